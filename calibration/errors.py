"""The one exception of this package."""


class CalibrationError(ValueError):
    """A model or data that cannot be calibrated; the message is for the operator."""
