"""What Triton's interpreter lacks for these kernels. `repair` is called where kernels are interpreted (TRITON_INTERPRET=1): in tests."""

import functools

import numpy as np
from triton.runtime import interpreter


@functools.cache
def repair():
    """Loop bounds under NumPy 2.4 and later, which refuses int() of a one-element array, and products of bfloat16 matrices, which the
    interpreter takes for integers.
    """
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = _dot


def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    return interpreter.TensorHandle(np.matmul(_numbers(a), _numbers(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _numbers(x):
    """bfloat16 is the upper half of float32."""
    return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar.is_bf16() else x.data
