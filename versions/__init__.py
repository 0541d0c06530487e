"""Runs the tests with other drivers, on other servers and Pythons: `make matrix`."""
