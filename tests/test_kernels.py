"""The Triton kernels without a GPU: in Triton's interpreter, and compiled ahead of time for three GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("no Triton outside Linux", allow_module_level=True)
import triton
from test_entropy import reference

from refimpl import kernels
from refimpl.entropy import log_prob_and_entropy
from refimpl.slicing import NO_TARGET


def test_in_the_interpreter() -> None:
    """Triton decides when it is imported whether it interprets, so these tests have a process of their own."""
    file = str(Path(__file__).with_name("interpreted.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert "13 passed" in done.stdout, done.stdout


def test_row_offsets_are_64_bit() -> None:
    """Liger #1248: row * stride wraps in 32 bits once T * V passes 2^31. The code before PTX shows it."""
    for kernel in ("forward_kernel", "backward_kernel"):
        ttir = compiled(kernel, "fp32", 90).asm["ttir"]
        (row,) = re.findall(r"(%\S+) = tt.get_program_id x : i32", ttir)
        assert re.search(rf"extsi {row} : i32 to i64", ttir)
        assert not re.search(rf"muli {row},|muli %\S+, {row} ", ttir)


def compiled(kernel: str, dtype: str, arch: int) -> Any:
    """Compile one kernel for one GPU, as if every pointer and the row length were aligned to 16, as real ones are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(kernels, kernel)
    names = function.arg_names
    kinds = {
        "x": f"*{dtype}",
        "gradient": f"*{dtype}",
        "target": "*i64",
        "out": "*fp32",
        "constants": "*fp32",
        "scale": "fp32",
    }
    constants = {"BLOCK": 4096, "ACC": triton.language.float32}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n not in constants and n not in ("scale", "rows")
    }
    source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 8 if kernel == "forward_kernel" else 4}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers, stack and local bytes, as the tool in Triton's own wheel prints them."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    printed = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", printed)}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel"])
def test_compiled_ahead_of_time(kernel: str, dtype: str, arch: int, tmp_path: Path) -> None:
    result = compiled(kernel, dtype, arch)
    used = resources(result.asm["cubin"], tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, "registers spill"
    assert 0 < used["REG"] <= 128
    wide = r"ld\.global\S*\.v4\.(b32|f32|u32)"
    assert re.search(wide, result.asm["ptx"]), "no 16-byte loads"
    if kernel == "backward_kernel":
        assert re.search(r"st\.global\S*\.v4\.(b32|f32|u32)", result.asm["ptx"]), "no 16-byte stores"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_on_the_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(64, 151_936) * 3).to(dtype)
    logits[1, ::2] = -torch.inf
    targets = torch.randint(0, 75_000, (64,)) * 2 + 1
    targets[::5] = NO_TARGET
    g1, g2 = torch.randn(2, 64)
    want = reference(logits, targets, g1, g2)
    leaf = logits.cuda().requires_grad_()
    log_prob, h = log_prob_and_entropy(leaf, targets.cuda(), backend="fused")
    assert h is not None
    torch.autograd.backward([log_prob, h], [g1.to(h).cuda(), g2.to(h).cuda()])
    assert leaf.grad is not None
    torch.testing.assert_close(log_prob.double().cpu(), want[0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(h.double().cpu(), want[1], atol=1e-4, rtol=1e-5)
    ulp = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(dtype, 1e-4)
    torch.testing.assert_close(leaf.grad.double().cpu(), want[2], atol=1e-5, rtol=ulp)
