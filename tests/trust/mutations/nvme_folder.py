"""Whose an NVMe tier's folder and files are, who may have them, and what happens when they are
lost."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_OWN, _FOLDER = "tiers/own_folder.py", "tiers/nvme/folder.py"
_FILES, _TIER = "tiers/nvme/files.py", "tiers/nvme/tier.py"

ROOM = Room(
    {
        "folder": (*PYTEST, "tests/fault/test_nvme_folder.py"),
        "faults": (*PYTEST, "tests/fault/test_nvme_faults.py", "-k", "not kill_9"),
        "contract": (*PYTEST, "tests/contract/test_nvme_tier.py"),
        "check": (*PYTEST, "tests/integration/test_fsck.py"),
        "probe": (*PYTEST, "tests/integration/test_probe.py", "-k", "candidate"),
    },
    mutants=(
        # ---- whose it is ---
        Mutant(
            _OWN,
            (
                "    return (\n"
                "        []\n"
                "        if state.st_uid == os.geteuid()\n"
                '        else [f"owner {state.st_uid}, expected {os.geteuid()} (this process)"]\n'
                "    )\n"
            ),
            '    return [] if True else [f"owner {state.st_uid}, expected {os.geteuid()} (this '
            'process)"]\n',
            "another user's folder and files are believed",
        ),
        Mutant(
            _OWN,
            "        if state.st_uid == os.geteuid()\n",
            "        if state.st_uid in (0, os.geteuid())\n",
            "an ordinary user writes into root's folder",
        ),
        Mutant(
            _OWN,
            "if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):",
            "if state.st_mode & stat.S_IWOTH:",
            "a folder that a group may write is believed",
        ),
        Mutant(
            _OWN,
            "if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):",
            "if state.st_mode & stat.S_IWGRP:",
            "a folder that every user may write is believed",
        ),
        Mutant(
            _OWN,
            "if state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):",
            "if state.st_mode & stat.S_IRWXG:",
            "a file that every user may have opened is believed",
        ),
        Mutant(
            _OWN,
            "if state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):",
            "if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):",
            "chunks go into a file that every user may read",
        ),
        Mutant(
            _OWN,
            "    if state.st_nlink > 1:",
            "    if state.st_nlink > 2:",
            "another file of ours that was linked into the folder is overwritten",
        ),
        Mutant(
            _OWN,
            "    if not stat.S_ISREG(state.st_mode):",
            "    if False:",
            "a pipe is taken for a file of the tier",
        ),
        Mutant(
            _OWN,
            "_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC",
            "_FLAGS = os.O_CLOEXEC",
            "a link in the folder leads to another file",
        ),
        Mutant(
            _OWN,
            "        wrong = _wrong_with_file(os.fstat(fd))\n",
            "        wrong: list[str] = []\n",
            "files are not looked at",
        ),
        Mutant(
            _OWN,
            "        if wrong:\n            os.close(self._fd)",
            "        if len(wrong) > 1:\n            os.close(self._fd)",
            "one fault of a folder is forgiven",
        ),
        Mutant(
            _OWN,
            (
                "                os.fchmod(\n"
                "                    made, 0o600\n"
                "                )  # a umask may have left fewer rights than the next "
                "start needs\n"
            ),
            "                pass  # a umask may have left fewer rights than the next "
            "start needs\n",
            "after a start with a narrow umask the next one cannot open the files",
        ),
        Mutant(
            _OWN,
            "                    made, 0o600\n",
            "                    made, 0o644\n",
            "the tier makes files that every user may read, and refuses them",
        ),
        # ---- the way there ---
        Mutant(
            "core/secret_files.py",
            "    if state.st_uid not in (0, os.geteuid()):\n        os.close(found)",
            "    if False:\n        os.close(found)",
            "a stranger's link leads root's tier into any folder",
        ),
        Mutant(
            "core/secret_files.py",
            "    if links >= _MOST_LINKS:",
            "    if links >= 1:",
            "a second link on the way is refused",
        ),
        Mutant(
            "core/secret_files.py",
            "os.mkdir(name, 0o700, dir_fd=here)",
            "os.mkdir(name, 0o777, dir_fd=here)",
            "folders are made that others may enter",
        ),
        Mutant(
            _FOLDER,
            "    except (OSError, TierError):\n        return False",
            "    except (OSError, TierError):\n        return True",
            "auto-config chooses a folder that the tier then refuses",
        ),
        # ---- who has it ---
        Mutant(
            _FILES,
            "        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)",
            "        fcntl.flock(index, fcntl.LOCK_SH | fcntl.LOCK_NB)",
            "two processes write one folder",
        ),
        Mutant(
            "tiers/nvme/check.py",
            "            if who := lock(index):",
            '            if who := "":',
            "a folder in use is repaired or removed",
        ),
        Mutant(
            _FILES,
            "            if self._locked:  # another process",
            "            if True:  # another process",
            "a start that is refused removes the files of the one that runs",
        ),
        # ---- what is lost ---
        Mutant(
            _FOLDER,
            "    except (FileNotFoundError, NotADirectoryError):\n        return False",
            "    except (FileNotFoundError, NotADirectoryError):\n        return True",
            "a folder that was removed is not noticed",
        ),
        Mutant(
            _FOLDER,
            "    except OSError:\n        return True",
            "    except OSError:\n        return False",
            "a disk that fails counts as a folder that was removed",
        ),
        Mutant(
            _FOLDER,
            "return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))",
            "return bool(os.stat(path, follow_symlinks=False))",
            "another folder in the place of ours is not noticed",
        ),
        Mutant(
            _FILES,
            "((INDEX_NAME, self._index), (SLOTS_NAME, self._payload))",
            "((INDEX_NAME, self._index),)",
            "payloads go on into a file that was removed",
        ),
        Mutant(
            _TIER,
            "        if not self._look():\n",
            "        self._look()\n        if False:\n",
            "what nobody will find again is written",
        ),
        Mutant(
            _TIER,
            '            self._trouble = ""\n            return True',
            "            return True",
            "trouble that is over is told for ever",
        ),
        Mutant(
            "admin/status.py",
            "    return [*server.trouble.values(), *away, *(text for text in lost if text)]",
            "    return [*server.trouble.values(), *away]",
            "health does not name a folder that was lost",
        ),
        Mutant(
            _FILES,
            "                self._tell_of_removed()",
            "                pass",
            "who opens the path next is not told who still has the room",
        ),
        # ---- the order of writes ---
        Mutant(
            _TIER,
            "        try:\n            self._files.write_record(slot, EMPTY_RECORD)\n",
            "        with self._lock:\n            self._free.append(slot)\n"
            "        try:\n            self._files.write_record(slot, EMPTY_RECORD)\n            "
            "return\n",
            "a slot is free before its record is erased: a crash costs a chunk that was "
            "acknowledged",
        ),
    ),
)
