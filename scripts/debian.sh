#!/usr/bin/env bash
# smp on Debian's own packages, in roots of Debian 13 below build/debian; the
# machine itself stays as it is. Runs as root on a Debian, or a relative of it,
# that has mmdebstrap or debootstrap.
# Usage: scripts/debian.sh [root|package|tests|install]...
#   root     a root with what debian/control builds and tests with; it is kept
#   package  dpkg-buildpackage in it, on a copy of the checkout: python3-smp,
#            with the C++ tests, but for DEB_BUILD_OPTIONS=nocheck
#   tests    Python tests of one process, and a sample of those of several,
#            with what the package installs
#   install  the package in a root that has nothing else, and the quickstart
# Without a stage all of them. TESTS="tests/unit tests/api" runs these in the
# stage tests, SMP_TEST_JOBS=1 one at a time. Packages come from DEBIAN_MIRROR,
# or from where apt of this machine takes its own; nothing comes from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=trixie
folder=$PWD/build/debian
base=$folder/base          # as mmdebstrap makes it
root=$folder/root          # and what debian/control asks for
clean=$folder/clean        # and the package alone
archives=$folder/archives  # packages of Debian
shared=$folder/build       # /build in each of them: compiler's cache, packages
tree=$shared/smp           # and the copy of the checkout

fail() { echo "make debian: $*" >&2; exit 1; }

# The first archive of Debian among the sources of this machine's apt that has
# the suite; those of other distributions and of single vendors do not count.
mirror() {
  if [[ -n ${DEBIAN_MIRROR:-} ]]; then
    echo "$DEBIAN_MIRROR"
    return
  fi
  local uri release=$folder/Release
  while read -r uri; do
    /usr/lib/apt/apt-helper download-file "$uri/dists/$suite/Release" \
      "$release" > /dev/null 2>&1 || continue
    if grep -qx 'Origin: Debian' "$release" &&
      grep -qx 'Label: Debian' "$release"; then
      echo "$uri"
      return
    fi
  done < <(apt-get update --print-uris |
    sed -En "s#^'(https?://[^']*[^/])/*/dists/[^']*/InRelease' .*#\1#p" | uniq)
  fail "no source of this machine's apt is a mirror of Debian with $suite;" \
    "name one: DEBIAN_MIRROR=http://... make debian"
}

# inside <root> <command> [argument]...: runs it there, in the copy of the
# checkout. Mounts and processes end with it.
inside() {
  # shellcheck disable=SC2016 # the inner shell's
  unshare --mount --pid --ipc --fork --kill-child bash -euc '
    root=$1 archives=$2 shared=$3
    shift 3
    mkdir -p "$root/build"
    mount -t proc proc "$root/proc"
    mount -t sysfs sys "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
    mount -t tmpfs -o mode=1777 tmp "$root/tmp"
    mount --bind "$archives" "$root/var/cache/apt/archives"
    mount --bind "$shared" "$root/build"
    for file in /etc/resolv.conf /etc/hosts; do
      touch "$root$file"
      mount --bind "$file" "$root$file"
    done
    exec chroot "$root" env -i -C /build/smp HOME=/root LANG=C.UTF-8 \
      PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      DEBIAN_FRONTEND=noninteractive CCACHE_DIR=/build/ccache \
      ${http_proxy:+"http_proxy=$http_proxy"} \
      ${https_proxy:+"https_proxy=$https_proxy"} "$@"' \
    inside "$1" "$archives" "$shared" "${@:2}"
}

# What git has or would add, with its times.
copy_tree() {
  find "$tree" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
  git ls-files -z --cached --others --exclude-standard |
    while IFS= read -rd '' file; do
      [[ -L $file || ! -f $file ]] || printf '%s\0' "$file"
    done | tar --create --null --files-from=- | tar --extract -C "$tree"
}

make_base() {
  [[ ! -e $base.ready ]] || return 0
  local from
  from=$(mirror)
  rm -rf "$base"
  if command -v mmdebstrap > /dev/null; then
    mmdebstrap --mode=root --variant=apt "$suite" "$base" "$from"
  elif command -v debootstrap > /dev/null; then
    debootstrap --variant=minbase "$suite" "$base" "$from"
  else
    fail "needs mmdebstrap or debootstrap: apt-get install mmdebstrap"
  fi
  # Downloaded packages are kept, for the next root.
  echo 'Binary::apt::APT::Keep-Downloaded-Packages "true";' \
    > "$base/etc/apt/apt.conf.d/90keep"
  # Nor does a root have to outlive a crash of the machine.
  echo force-unsafe-io > "$base/etc/dpkg/dpkg.cfg.d/90fast"
  inside "$base" apt-get -q update
  touch "$base.ready"
}

# ccache beside what the package asks for: a build that is repeated after a
# change compiles what has changed.
stage_root() {
  local wanted
  wanted=$(sha256sum < debian/control)
  [[ ! -e $root.ready || $(< "$root.ready") != "$wanted" ]] || return 0
  make_base
  copy_tree
  rm -rf "$root" "$root.ready"
  cp -a "$base" "$root"
  inside "$root" apt-get -qy --no-install-recommends build-dep ./
  inside "$root" apt-get -qy --no-install-recommends install ccache
  echo "$wanted" > "$root.ready"
}

stage_package() {
  copy_tree
  rm -f "$shared"/*.deb
  inside "$root" env "DEB_BUILD_OPTIONS=parallel=${JOBS:-$(env -u OMP_NUM_THREADS nproc)} ${DEB_BUILD_OPTIONS:-}" \
    dpkg-buildpackage --build=binary --no-sign
  ls -l "$shared"/python3-smp_*.deb
}

install_package() {
  inside "$1" bash -c \
    'apt-get -qy --no-install-recommends --reinstall install /build/python3-smp_*.deb'
}

stage_tests() {
  install_package "$root"
  local tests
  read -ra tests <<< "${TESTS:-}"
  inside "$root" env "SMP_TEST_JOBS=${SMP_TEST_JOBS:-2}" debian/tests/python "${tests[@]}"
}

stage_install() {
  make_base
  rm -rf "$clean"
  cp -a "$base" "$clean"
  install_package "$clean"
  inside "$clean" debian/tests/quickstart
}

[[ $(id -u) == 0 ]] || fail "needs root, for chroot and the mounts in it"
stages=("$@")
(($#)) || stages=(root package tests install)
mkdir -p "$archives/partial" "$tree"
times=()
for stage in "${stages[@]}"; do
  [[ $(type -t "stage_$stage") == function ]] ||
    fail "no stage $stage; there are root, package, tests, install"
  begin=$SECONDS
  echo "=== $stage"
  "stage_$stage"
  times+=("$stage $((SECONDS - begin)) s")
done
printf '=== %s\n' "${times[@]}"
