# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compiles CUDA C to PTX with NVIDIA's compiler as a library (NVRTC): `ptx.py SOURCE PTX`.

Then compiles the PTX for several GPUs with NVIDIA's assembler, as a check.
"""

import ctypes
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

# GPUs from Volta on, and the PTX of CUDA 9.0, the first for them: drivers refuse PTX that is newer
# than they are.
TARGET = "compute_70"
VERSION = "6.0"
CHECKED = ["sm_70", "sm_75", "sm_80", "sm_90", "sm_120"]


def file_of(package: str, name: str) -> Path:
    """Returns the path of an installed file."""
    files = distribution(package).files or []
    return Path(str(next(file.locate() for file in files if file.name == name)))


def fnv(data: bytes) -> int:
    """Returns the 64-bit FNV-1a hash."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def compile_ptx(source: bytes) -> str:
    """Returns the PTX of functions with C linkage."""
    nvrtc = ctypes.CDLL(str(file_of("nvidia-cuda-nvrtc-cu12", "libnvrtc.so.12")))

    def text(kind: str) -> str:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
        return buffer.value.decode()

    program = ctypes.c_void_p()
    linked = b'extern "C" {\n#line 1\n' + source + b"\n}\n"
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), linked, b"kernels.cu", 0, None, None)
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={TARGET}".encode(), b"-w")
    if code := nvrtc.nvrtcCompileProgram(program, len(options), options):
        sys.exit(f"nvrtcCompileProgram failed with code {code}:\n{text('ProgramLog')}")
    return text("PTX")


def main() -> None:
    """Compiles the file."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    ptx = compile_ptx(source.read_bytes())
    ptx = re.sub(r"(?m)^\.version .*$", f".version {VERSION}", ptx)
    # Comments would say which version of the compiler it was, several times.
    lines = [line for line in ptx.splitlines() if not line.startswith("//")]
    head = (
        "// SPDX-License-Identifier: MIT OR Apache-2.0\n"
        f"// Compiled from {source.name} by `cargo xtask ptx`.\n"
        f"// FNV-1a of the source: {fnv(source.read_bytes()):016x}\n"
    )
    target.write_text(head + "\n".join(lines).strip() + "\n")
    ptxas = file_of("nvidia-cuda-nvcc-cu12", "ptxas")
    for architecture in CHECKED:
        subprocess.run([ptxas, f"-arch={architecture}", target, "-o", "/dev/null"], check=True)
    print(f"{target}: {len(lines)} lines, assembled for {', '.join(CHECKED)}")


if __name__ == "__main__":
    main()
