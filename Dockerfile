# Two images: `--target gateway` (no torch) and `--target worker` (drafter and verifier). docs/deploy.md says how to build.
# The base needs Python 3.11 or later with venv, and Debian's tools; the gateway's sh, tar and sha256sum handle models.
ARG BASE_IMAGE=python:3.12-slim

# The gateway's dependencies, in a virtual environment. pip has one of its own and works on that from outside.
FROM ${BASE_IMAGE} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_PYTHON=/opt/tandem/bin/python
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/tandem
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY tools/requirements.py tools/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 tools/requirements.py pyproject.toml worker > worker.txt \
    && { python3 tools/requirements.py pyproject.toml && python3 tools/requirements.py pyproject.toml tracing; } > gateway.txt \
    && /opt/pip/bin/pip install -c constraints.txt -r gateway.txt

FROM dependencies AS code
COPY LICENSE README.md ./
COPY tandem tandem
COPY gateway gateway
COPY drafter_service drafter_service
COPY verifier_service verifier_service
COPY draft_training draft_training
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/pip/bin/pip install --no-deps --target /opt/code .

# What both images share.
FROM ${BASE_IMAGE} AS runtime
ENV PATH=/opt/tandem/bin:${PATH} PYTHONPATH=/opt/code PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=dependencies /opt/tandem /opt/tandem
WORKDIR /opt/code

FROM runtime AS gateway
COPY --from=code /opt/code /opt/code
LABEL org.opencontainers.image.title="tandem-gateway" org.opencontainers.image.licenses="Apache-2.0"
# By number: the kubelet cannot tell whether a name is root.
USER 10001:10001
ENTRYPOINT ["python", "-m", "gateway"]
CMD ["--config", "/etc/tandem/tandem.yaml"]

FROM runtime AS worker
# What compiles kernels when they are first used: Triton's on GPUs, the decoder's on CPUs.
ARG WORKER_PACKAGES=g++
RUN if [ -n "${WORKER_PACKAGES}" ]; then \
      apt-get update && apt-get install -y --no-install-recommends ${WORKER_PACKAGES} && rm -rf /var/lib/apt/lists/*; \
    fi
# Torch alone: the index that has the wanted build of it (CUDA, CPU) need not have the rest.
ARG TORCH_INDEX_URL=
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=bind,from=dependencies,source=/opt/pip,target=/opt/pip \
    --mount=type=bind,from=dependencies,source=/src,target=/src \
    export PIP_NO_CACHE_DIR=1 PIP_PYTHON=/opt/tandem/bin/python PIP_CONSTRAINT=/src/constraints.txt \
    && /opt/pip/bin/pip install ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} torch \
    && /opt/pip/bin/pip install -r /src/worker.txt
COPY --from=code /opt/code /opt/code
LABEL org.opencontainers.image.title="tandem-worker" org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
ENTRYPOINT ["python", "-m"]
CMD ["verifier_service", "--config", "/etc/tandem/tandem.yaml"]
