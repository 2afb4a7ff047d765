"""Encryption at rest: what opens a chunk, what tells keys apart, and what of the key may be
seen."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "sealed": (*PYTEST, "tests/contract/test_sealed_tier.py"),
        "key": (
            *PYTEST,
            "tests/integration/test_secrets.py",
            "-k",
            ("four_bytes or name_of_a_key or which_key"),
        ),
        "folder": (*PYTEST, "tests/fault/test_nvme_folder.py", "-k", "lost_folder"),
    },
    mutants=(
        Mutant(
            "sealed.key_name",
            "sha256(b'kvtier encryption key\\x00' + key).digest()",
            "key",
            "the first bytes of the key stand in names, logs and on the disk",
        ),
        Mutant(
            "sealed.key_name",
            "b'kvtier encryption key\\x00' + key",
            "key",
            "another version finds none of its chunks",
        ),
        Mutant(
            "sealed.key_name",
            "sha256(b'kvtier encryption key\\x00' + key).digest()[:_NAME_BYTES]",
            "bytes(_NAME_BYTES)",
            "servers with different keys delete each other's chunks in Redis",
        ),
        Mutant(
            "SealedTier._opens",
            "return False",
            "return True",
            "chunks that do not open are served",
        ),
        Mutant(
            "SealedTier._opens",
            "self._cipher(nonce).decrypt_into(nonce[_DERIVING_BYTES:], stored[:end], key, into)",
            "self._cipher(nonce).decrypt_into(nonce[_DERIVING_BYTES:], stored[:end], b'', into)",
            "no chunk opens",
        ),
        Mutant(
            "SealedTier.read",
            "if not found or self._opens(key, stored, into):\n    ...",
            "self._opens(key, stored, into)\nif found:\n    ...",
            "whether a chunk opens is not asked",
        ),
        Mutant(
            "SealedTier._cipher",
            "AES(self._key)",
            "AES(bytes(KEY_BYTES))",
            "every key opens every chunk",
        ),
        Mutant(
            "SealedTier._cipher",
            "nonce[:_DERIVING_BYTES]",
            "bytes(_DERIVING_BYTES)",
            "one derived key for all chunks: nonces repeat within days",
        ),
        Mutant(
            "SealedTier._cipher",
            "for counter in (1, 2):\n    ...",
            "for counter in (1, 1):\n    ...",
            "the cipher is not the published one",
        ),
        Mutant(
            "SealedTier.read",
            "self.inner.delete(key)",
            "",
            "a chunk that does not open is read again and again",
        ),
        Mutant(
            "SealedTier.read",
            "self._unopened += 1",
            "self._unopened += 0",
            "forged chunks are not counted",
        ),
        Mutant(
            "SealedTier.counts",
            "counts['corrupt'] += self._unopened",
            "counts['corrupt'] += 0",
            "the alert on corrupt chunks does not see forged ones",
        ),
        Mutant(
            "SealedTier.recovered",
            "not self._is_foreign(keys)",
            "keys",
            "after a change of the key every old chunk lets a prompt wait",
        ),
        Mutant(
            "SealedTier.recovered",
            "self.shared or not self._is_foreign(keys)",
            "not self._is_foreign(keys)",
            "one foreign chunk in Redis drops all",
        ),
        Mutant(
            "ForwardingTier.trouble",
            "self.inner.trouble",
            "''",
            "the trouble of an encrypted tier is not told",
        ),
        Mutant(
            "assemble.secret_key",
            "re.fullmatch('[0-9a-fA-F]{64}', given)",
            "re.fullmatch('[0-9a-fA-F]*', given)",
            "a short key is taken",
        ),
        Mutant(
            "assemble.secret_key",
            "given is not None",
            "False",
            "of two keys one is taken in silence",
        ),
        Mutant(
            "redis.parts.open",
            "around.namespace",
            "around.namespace[:8]",
            "servers with different keys meet in Redis and delete each other's chunks",
        ),
    ),
)
