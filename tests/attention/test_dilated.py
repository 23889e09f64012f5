from tests.attention.oracles import SoftmaxContract


class TestDilated(SoftmaxContract):
    name = "dilated"
    options = {"width": 5, "dilation": 3, "rope": True}

    def sees(self, t, s, head):
        width, dilation = self.options["width"], self.options["dilation"]
        steps = range(width) if self.options.get("causal", True) else range(-((width - 1) // 2), width // 2 + 1)
        return s in [t - step * dilation for step in steps]


class TestDilatedBidirectional(TestDilated):
    name = "dilated"
    options = {"width": 6, "dilation": 3, "causal": False}
