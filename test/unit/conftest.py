"""Triton's kernels run in its interpreter where there is no GPU. It reads this when a kernel is decorated, so before imports."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
