# `kvtier serve` alone: no vLLM, no torch, no GPU. From the root of a checkout:
#   docker build -f deploy/docker/server.Dockerfile -t kvtier-server .
FROM python:3.12-slim

COPY . /opt/kvtier
RUN python -m pip install --no-cache-dir "/opt/kvtier[server]" && kvtier version

# Root, as vLLM's own image: server and engines must be the same user, or engines root.
VOLUME ["/run/kvtier", "/var/lib/kvtier"]
ENTRYPOINT ["kvtier", "serve"]
CMD ["--listen", "unix:///run/kvtier/kvtier.sock"]
