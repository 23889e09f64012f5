"""The data sets of Long Range Arena, generated or read. Imports nothing, to keep the generating processes small."""
