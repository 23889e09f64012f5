"""The harness of the experiments: it runs a recipe's units, keeps their rows, compares them with the paper's figures.

An experiment's `experiment.py` imports its tools from the modules in here.
"""
