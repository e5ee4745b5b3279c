"""Ascend operators on any machine: contract and reference kernel behind ``torch.ops.npu.*``."""
