"""Encryption at rest: what opens a chunk, what tells keys apart, and what of the key may be
seen."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_SEALED = "tiers/sealed.py"

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
            _SEALED,
            'return sha256(b"kvtier encryption key\\0" + key).digest()[:_NAME_BYTES]',
            "return key[:_NAME_BYTES]",
            "the first bytes of the key stand in names, logs and on the disk",
        ),
        Mutant(
            _SEALED,
            'return sha256(b"kvtier encryption key\\0" + key).digest()[:_NAME_BYTES]',
            "return sha256(key).digest()[:_NAME_BYTES]",
            "another version finds none of its chunks",
        ),
        Mutant(
            _SEALED,
            'return sha256(b"kvtier encryption key\\0" + key).digest()[:_NAME_BYTES]',
            "return bytes(_NAME_BYTES)",
            "servers with different keys delete each other's chunks in Redis",
        ),
        Mutant(
            _SEALED,
            "        except InvalidTag:\n            return False",
            "        except InvalidTag:\n            return True",
            "chunks that do not open are served",
        ),
        Mutant(
            _SEALED,
            "decrypt_into(nonce[_DERIVING_BYTES:], stored[:end], key, into)",
            'decrypt_into(nonce[_DERIVING_BYTES:], stored[:end], b"", into)',
            "no chunk opens",
        ),
        Mutant(
            _SEALED,
            "        if not found or self._opens(key, stored, into):\n            return found",
            "        self._opens(key, stored, into)\n        if found:\n            return found",
            "whether a chunk opens is not asked",
        ),
        Mutant(
            _SEALED,
            "            half = CMAC(AES(self._key))",
            "            half = CMAC(AES(bytes(KEY_BYTES)))",
            "every key opens every chunk",
        ),
        Mutant(
            _SEALED,
            'half.update(bytes((0, counter)) + b"X\\0" + nonce[:_DERIVING_BYTES])',
            'half.update(bytes((0, counter)) + b"X\\0" + bytes(_DERIVING_BYTES))',
            "one derived key for all chunks: nonces repeat within days",
        ),
        Mutant(
            _SEALED,
            "        for counter in (1, 2):",
            "        for counter in (1, 1):",
            "the cipher is not the published one",
        ),
        Mutant(
            _SEALED,
            "        self.inner.delete(key)\n        return False",
            "        return False",
            "a chunk that does not open is read again and again",
        ),
        Mutant(
            _SEALED,
            "            self._unopened += 1",
            "            self._unopened += 0",
            "forged chunks are not counted",
        ),
        Mutant(
            _SEALED,
            'counts["corrupt"] += self._unopened',
            'counts["corrupt"] += 0',
            "the alert on corrupt chunks does not see forged ones",
        ),
        Mutant(
            _SEALED,
            "        if self.shared or not self._is_foreign(keys):",
            "        if self.shared or keys:",
            "after a change of the key every old chunk lets a prompt wait",
        ),
        Mutant(
            _SEALED,
            "        if self.shared or not self._is_foreign(keys):",
            "        if not self._is_foreign(keys):",
            "one foreign chunk in Redis drops all",
        ),
        Mutant(
            "tiers/forwarding.py",
            "return self.inner.trouble",
            'return ""',
            "the trouble of an encrypted tier is not told",
        ),
        Mutant(
            "assemble.py",
            'if not re.fullmatch("[0-9a-fA-F]{64}", given):',
            'if not re.fullmatch("[0-9a-fA-F]*", given):',
            "a short key is taken",
        ),
        Mutant(
            "assemble.py",
            "        if given is not None:\n",
            "        if False:\n",
            "of two keys one is taken in silence",
        ),
        Mutant(
            "tiers/redis/parts.py",
            "Form(_PREFIX, around.namespace)",
            "Form(_PREFIX, around.namespace[:8])",
            "servers with different keys meet in Redis and delete each other's chunks",
        ),
    ),
)
