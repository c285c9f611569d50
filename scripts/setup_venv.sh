#!/usr/bin/env bash
# Creates or updates a virtual environment with the pinned requirements.
# Usage: scripts/setup_venv.sh <folder> [build|run|all] [torch version]
#   build  what the compiler reads: torch without the libraries it loads
#   run    also what training scripts import
#   all    also tests, lint and packaging (the default)
# Does nothing when the folder already holds what is asked for.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
level=${2:-all}
torch=${3:-$(sed -n 's/^torch==//p' requirements/torch.txt)}
python=${PYTHON:-python3}
# What an active copy of this very folder offers is not the system's.
PATH=${PATH//"$PWD/$venv/bin:"/}

# Build tools that the system lacks. `mpicc` stands for a complete MPI.
pinned() { grep "^$1==" requirements/system.txt; }
recent_cmake() {
  command -v cmake > /dev/null &&
    "$python" -c 'import sys; v = sys.argv[1].split(".")
sys.exit((int(v[0]), int(v[1])) < (3, 22))' \
      "$(cmake --version | sed -n 's/^cmake version //p')"
}
tools=()
recent_cmake || tools+=("$(pinned cmake)")
command -v ninja > /dev/null || tools+=("$(pinned ninja)")
command -v mpicc > /dev/null || tools+=("$(pinned openmpi)")

# Packages of the developed release come with the hashes of requirements/locked,
# which scripts/lock.sh writes: nothing else is installed, whatever an index has.
# Another torch needs others; HASHES=off is for an index with files of its own.
locked=requirements/locked
hashes=${HASHES:-on}
grep -qx "torch==$torch" requirements/torch.txt || hashes=off

wanted=$(echo "torch==$torch" "${tools[@]}" "$hashes" |
  cat - requirements/{run,test,tools}.txt "$locked"/{all,system}.txt | sha256sum)
stamp() { echo "$venv/.smp_ready_$1"; }
has() { [[ -f $(stamp "$1") && $(cat "$(stamp "$1")") == "$wanted" ]]; }
install() {
  has "$1" && return
  echo "installing into $venv, once: $1"
  "$python" scripts/install.py "$venv/bin/python" "${@:2}"
  echo "$wanted" > "$(stamp "$1")"
}

# block <name==version>: its lines in the locked files
block() {
  awk -v name="$1" '$1 == name { on = 1 } on { print } on && !/\\$/ { exit }' \
    "$locked"/{all,system}.txt | grep .
}

if ! has "$level"; then
  [[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
  # In this environment `import smp` means the checkout, from any folder.
  "$venv/bin/python" -c 'import pathlib, sysconfig
packages = pathlib.Path(sysconfig.get_path("purelib"))
(packages / "smp_checkout.pth").write_text(str(pathlib.Path("python").resolve()) + "\n")'
fi
if [[ $hashes != off ]]; then
  checked=(--no-deps --require-hashes)
  for package in "torch==$torch" "${tools[@]}"; do block "$package"; done \
    > "$venv/.smp_build.txt"
  build=("${checked[@]}" -r "$venv/.smp_build.txt")
  run=("${checked[@]}" -r "$locked/run.txt")
  all=("${checked[@]}" -r "$locked/all.txt")
else
  build=(--no-deps "torch==$torch" "${tools[@]}")
  run=("torch==$torch" -r requirements/run.txt)
  all=("${run[@]}" -r requirements/test.txt -r requirements/tools.txt)
fi
install build "${build[@]}"
[[ $level == build ]] && exit
install run "${run[@]}"
[[ $level == run ]] && exit
install all "${all[@]}"
