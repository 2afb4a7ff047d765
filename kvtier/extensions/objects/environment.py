"""Variables of an object store's own library."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvtier.core.processes import chosen, environment

_ENDPOINTS = (
    *("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    *("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_STORE_KEYS = ("AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY")
_CREDENTIALS_FROM = (
    *("AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    *("AZURE_AUTHORITY_HOST", "IDENTITY_ENDPOINT"),
)
_CREDENTIAL_HOSTS = (
    *("169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23"),
    *("amazonaws.com", "amazonaws.com.cn", "microsoftonline.com", "microsoftonline.us"),
)
"""Of instances' roles and of the services that change one credential for another."""
_PROVIDERS = {
    "s3": ("AWS_*",),
    "gs": ("GOOGLE_*", "GCE_METADATA_*", "SERVICE_ACCOUNT"),
    "az": ("AZURE_*", "IDENTITY_*", "IMDS_*", "MSI_*"),
}
_ANY_PROVIDERS = ("SSL_CERT_*", *_PROXIES, "NO_PROXY", "RUST_*")
"""The variables that the library reads, by scheme and for all."""


def library_environment(scheme: str) -> dict[str, str]:
    """Environment of the library's process: the provider's own variables, and no
    secret of anything else. The library reads the names of proxies in small letters too."""
    both = (*_ANY_PROVIDERS, *(name.lower() for name in _ANY_PROVIDERS))
    return chosen(environment(), *_PROVIDERS[scheme], *both)


def plain_http_allowed() -> bool:
    """Whether the operator wants an object store to be reached without TLS: said in the variables
    of the store's own library, like its endpoint and credentials."""
    surroundings = environment()
    return any(
        surroundings.get(f"{name}_ALLOW_HTTP", "").lower() in ("true", "1")
        for name in ("AWS", "GOOGLE", "AZURE")
    )


def object_hosts() -> tuple[str, ...]:
    """The only hosts that an object store's library has to reach, where the operator names an
    endpoint in its variables: that host, and without a key those that give credentials. Empty: it
    reaches the provider's own hosts, or goes through a proxy of the operator's."""
    given = {name.upper(): value for name, value in environment().items() if value}
    if given.keys().isdisjoint(_ENDPOINTS) or not given.keys().isdisjoint(_PROXIES):
        return ()
    hosts = [urlsplit(given.get(name, "")).hostname or "" for name in _ENDPOINTS]
    if given.keys().isdisjoint(_STORE_KEYS):
        hosts += [urlsplit(given.get(name, "")).hostname or "" for name in _CREDENTIALS_FROM]
        hosts += _CREDENTIAL_HOSTS
    return tuple(filter(None, hosts))
