# smp for NVIDIA GPUs. PyTorch's wheels bring the libraries of CUDA, a wheel of
# NVIDIA the compiler; the driver is that of the host.
#   buildah build -f docker/cuda.Dockerfile -t smp:cuda .    (or docker, podman)
#   buildah build --build-arg ARCHITECTURES="80;90" for A100 and H100 alone
ARG DEBIAN=debian:12-slim

# hadolint ignore=DL3006
FROM ${DEBIAN} AS build
ARG ARCHITECTURES=sold
ENV DEBIAN_FRONTEND=noninteractive
# Packages of a stable Debian change by security updates alone, and these are wanted.
# hadolint ignore=DL3008
RUN apt-get update && apt-get -y --no-install-recommends install \
    ca-certificates cmake g++ ninja-build python3-dev python3-venv \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/locked requirements/locked
# What compiles is not in the environment that is copied.
RUN python3 -m venv /opt/smp \
  && /opt/smp/bin/pip install --no-cache-dir --no-deps --require-hashes \
    -r requirements/locked/run.txt \
  && /opt/smp/bin/pip install --no-cache-dir --no-deps --require-hashes \
    --target /tools -r requirements/locked/cuda.txt
COPY . .
RUN PYTHONPATH=/tools CUDA_HOME=/tools/nvidia/cu13 \
    SKBUILD_CMAKE_DEFINE="SMP_CUDA=on;SMP_MPI=off;SMP_CUDA_ARCHITECTURES=$ARCHITECTURES" \
    /opt/smp/bin/pip wheel --no-build-isolation --no-deps -w /wheels . \
  && /opt/smp/bin/pip install --no-cache-dir --no-index --no-deps /wheels/*.whl

# hadolint ignore=DL3006
FROM ${DEBIAN}
# A compiler is for torch.compile, whose code is compiled where it runs.
# hadolint ignore=DL3008
RUN apt-get update && apt-get -y --no-install-recommends install g++ python3-dev \
  && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/smp /opt/smp
ENV PATH=/opt/smp/bin:$PATH
RUN python3 -c 'import smp; from smp import _build_info as b; assert b.HAS_CUDA; print(smp.__version__)'
WORKDIR /job
CMD ["smp", "doctor"]
