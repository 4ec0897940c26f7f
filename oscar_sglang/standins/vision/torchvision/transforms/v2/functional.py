from ..._absent import absent

__getattr__ = absent(__name__)
