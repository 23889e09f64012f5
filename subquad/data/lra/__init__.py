"""The data sets of Long Range Arena: made by its rules or read. Nothing loads here: makers run in small processes."""
