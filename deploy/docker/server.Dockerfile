# `kvtier serve` alone: no vLLM, no torch, no GPU. From the root of a checkout:
#   docker build -f deploy/docker/server.Dockerfile -t kvtier-server .
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1

FROM ${PYTHON_IMAGE} AS build
COPY . /src
RUN python -m pip install --no-cache-dir --no-deps -r /src/requirements/images/build.txt \
    && cd /src && python -m hatchling build -t wheel -d /dist

FROM ${PYTHON_IMAGE}
COPY requirements/images/server.txt /opt/kvtier/
COPY --from=build /dist /opt/kvtier/dist
RUN python -m pip install --no-cache-dir --no-deps -r /opt/kvtier/server.txt /opt/kvtier/dist/*.whl \
    && kvtier --version \
    && groupadd --gid 10001 kvtier \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/kvtier --no-create-home --shell /usr/sbin/nologin kvtier \
    && install -d -o 10001 -g 10001 -m 0700 /run/kvtier /var/lib/kvtier

# The user of engine.Dockerfile, too: a server lets in its own user and root, and nobody else.
USER 10001:10001
VOLUME ["/run/kvtier", "/var/lib/kvtier"]
ENTRYPOINT ["kvtier", "serve"]
CMD ["--listen", "unix:///run/kvtier/kvtier.sock"]
