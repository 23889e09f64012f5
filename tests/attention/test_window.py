from subquad.testing import AttentionContract


class TestWindow(AttentionContract):
    name = "window"
    options = {"width": 11}
