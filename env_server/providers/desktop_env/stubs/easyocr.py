"""Replaces easyocr, which depends on torch: desktop-env imports it for one metric of text in pictures. Here that metric
raises this error instead of returning 0."""


class Reader:
    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("easyocr is not installed in this environment")
