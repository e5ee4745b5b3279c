"""Mixture of experts: the router, the way to the experts, and the way back."""
