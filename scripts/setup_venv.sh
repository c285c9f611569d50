#!/usr/bin/env bash
# Creates or updates a virtual environment with the pinned requirements.
# Usage: scripts/setup_venv.sh <folder> [torch version]
# Does nothing when the folder already holds what is asked for.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
torch=${2:-}
python=${PYTHON:-python3}
# What an active copy of this very folder offers is not the system's.
PATH=${PATH//"$PWD/$venv/bin:"/}

if [[ -n $torch ]]; then
  packages=("torch==$torch")
else
  packages=(-r requirements/torch.txt)
fi
packages+=(-r requirements/run.txt -r requirements/tools.txt)

# Build tools that the system lacks. `mpicc` stands for a complete MPI.
pinned() { grep "^$1==" requirements/system.txt; }
recent_cmake() {
  command -v cmake > /dev/null &&
    "$python" -c 'import sys; v = sys.argv[1].split(".")
sys.exit((int(v[0]), int(v[1])) < (3, 22))' \
      "$(cmake --version | sed -n 's/^cmake version //p')"
}
recent_cmake || packages+=("$(pinned cmake)")
command -v ninja > /dev/null || packages+=("$(pinned ninja)")
command -v mpicc > /dev/null || packages+=("$(pinned openmpi)")

wanted=$(echo "${packages[@]}" | cat - requirements/*.txt | sha256sum)
stamp=$venv/.smp_ready
if [[ -f $stamp && $(cat "$stamp") == "$wanted" ]]; then
  exit 0
fi

echo "setting up $venv (the first time takes some minutes)"
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
"${pip[@]}" "${packages[@]}"
# In this environment `import smp` means the checkout, from any folder.
"$venv/bin/python" -c 'import pathlib, sysconfig
packages = pathlib.Path(sysconfig.get_path("purelib"))
(packages / "smp_checkout.pth").write_text(str(pathlib.Path("python").resolve()) + "\n")'
echo "$wanted" > "$stamp"
