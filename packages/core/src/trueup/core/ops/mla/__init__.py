"""Fused steps of multi-head latent attention before attention: projections, norm, rope and the cache write."""
