"""Benchmarks of operators, models and decoding: times, memory, and how near they come to what the machine can do.

`python -m benchmarks ops|model|decode|images` in a clone of the repository. In Python `ops.measure_ops`,
`model.measure_model` and `decode.measure_decode` give a `report.Report`.
"""
