# smp for the CPU on Debian's own packages: PyTorch 2.6 with Gloo and MPI.
#   buildah build -f docker/cpu.Dockerfile -t smp:cpu .      (or docker, podman)
#   buildah build --build-arg DEBIAN=... for another copy of debian:13-slim
ARG DEBIAN=debian:13-slim

# hadolint ignore=DL3006
FROM ${DEBIAN} AS package
ENV DEBIAN_FRONTEND=noninteractive
WORKDIR /build/smp
# Packages of a stable Debian change by security updates alone, and these are wanted.
# hadolint ignore=DL3008
RUN apt-get update && apt-get -y --no-install-recommends install build-essential
COPY debian debian
RUN DEB_BUILD_PROFILES=nocheck apt-get -y --no-install-recommends build-dep ./
COPY . .
RUN DEB_BUILD_OPTIONS="nocheck parallel=$(nproc)" DEB_BUILD_PROFILES=nocheck \
  dpkg-buildpackage --build=binary --no-sign

# hadolint ignore=DL3006
FROM ${DEBIAN}
ENV DEBIAN_FRONTEND=noninteractive
COPY --from=package /build/python3-smp_*.deb /tmp/
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get -y --no-install-recommends install /tmp/python3-smp_*.deb \
    openmpi-bin python3-safetensors \
  && rm -rf /tmp/*.deb /var/lib/apt/lists/* \
  && python3 -c 'import smp; print(smp.__version__)'
WORKDIR /job
CMD ["smp", "doctor"]
