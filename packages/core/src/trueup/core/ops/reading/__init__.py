"""Contracts read as data: the rules of an operator, from the source of its contract."""
