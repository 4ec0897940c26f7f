"""The evaluation as one HTML file: no scripts, no fonts, nothing loaded from anywhere."""
