"""Benchmarks of operators, models and decoding: time, memory, and the share of the machine's peak rates.

Run `python -m benchmarks ops|model|decode|images` in a clone of the repository. In Python, `ops.measure_ops`,
`model.measure_model` and `decode.measure_decode` return a `report.Report`.
"""
