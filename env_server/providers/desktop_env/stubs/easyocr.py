"""Replaces easyocr, which depends on torch: desktop-env imports it for one metric of text in pictures. With this
substitute the metric raises an error instead of returning 0."""


class Reader:
    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("easyocr is not installed in desktop-env's environment; install it to use this metric")
