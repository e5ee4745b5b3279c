"""Attention operators: dense (fused infer attention), sparse (indexer and sparse attention), and merging parts."""
