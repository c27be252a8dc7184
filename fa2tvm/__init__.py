"""fa2tvm: FlashAttention-2 as Apache TVM TensorIR programs, tuned by MetaSchedule, called from PyTorch."""

__version__ = "0.1.0"
