"""Operators that treat every row alone: norms, activation, rope, and the filters of sampling."""
