"""What model files are written with: norm, rope tables, MLPs."""
