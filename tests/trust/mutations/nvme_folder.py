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
            "own_folder._not_ours",
            "state.st_uid == os.geteuid()",
            "True",
            "another user's folder and files are believed",
        ),
        Mutant(
            "own_folder._not_ours",
            "state.st_uid == os.geteuid()",
            "state.st_uid in (0, os.geteuid())",
            "an ordinary user writes into root's folder",
        ),
        Mutant(
            "OwnFolder.__init__",
            "stat.S_IWGRP | stat.S_IWOTH",
            "stat.S_IWOTH",
            "a folder that a group may write is believed",
        ),
        Mutant(
            "OwnFolder.__init__",
            "stat.S_IWGRP | stat.S_IWOTH",
            "stat.S_IWGRP",
            "a folder that every user may write is believed",
        ),
        Mutant(
            "own_folder._wrong_with_file",
            "stat.S_IRWXG | stat.S_IRWXO",
            "stat.S_IRWXG",
            "a file that every user may have opened is believed",
        ),
        Mutant(
            "own_folder._wrong_with_file",
            "stat.S_IRWXG | stat.S_IRWXO",
            "stat.S_IWGRP | stat.S_IWOTH",
            "chunks go into a file that every user may read",
        ),
        Mutant(
            "own_folder._wrong_with_file",
            "state.st_nlink > 1",
            "state.st_nlink > 2",
            "another file of ours that was linked into the folder is overwritten",
        ),
        Mutant(
            "own_folder._wrong_with_file",
            "not stat.S_ISREG(state.st_mode)",
            "False",
            "a pipe is taken for a file of the tier",
        ),
        Mutant(
            "tiers.own_folder",
            "os.O_NOFOLLOW | os.O_CLOEXEC",
            "os.O_CLOEXEC",
            "a link in the folder leads to another file",
        ),
        Mutant(
            "OwnFolder.open",
            "wrong = _wrong_with_file(os.fstat(fd))",
            "wrong: list[str] = []",
            "files are not looked at",
        ),
        Mutant(
            "OwnFolder.__init__",
            "if wrong:\n    ...",
            "if len(wrong) > 1:\n    ...",
            "one fault of a folder is forgiven",
        ),
        Mutant(
            "OwnFolder.open",
            "os.fchmod(made, 384)",
            "pass",
            "after a start with a narrow umask the next one cannot open the files",
        ),
        Mutant(
            "OwnFolder.open",
            "os.fchmod(made, 384)",
            "os.fchmod(made, 420)",
            "the tier makes files that every user may read, and refuses them",
        ),
        # ---- the way there ---
        Mutant(
            "secret_files._target",
            "state.st_uid not in (0, os.geteuid())",
            "False",
            "a stranger's link leads root's tier into any folder",
        ),
        Mutant(
            "secret_files._target",
            "links >= _MOST_LINKS",
            "links >= 1",
            "a second link on the way is refused",
        ),
        Mutant(
            "secret_files._enter",
            "os.mkdir(name, 448, dir_fd=here)",
            "os.mkdir(name, 511, dir_fd=here)",
            "folders are made that others may enter",
        ),
        Mutant(
            "folder.may_take",
            "return False",
            "return True",
            "auto-config chooses a folder that the tier then refuses",
        ),
        # ---- who has it ---
        Mutant(
            "files.lock",
            "fcntl.LOCK_EX | fcntl.LOCK_NB",
            "fcntl.LOCK_SH | fcntl.LOCK_NB",
            "two processes write one folder",
        ),
        Mutant(
            "check._locked",
            "lock(index)",
            "''",
            "a folder in use is repaired or removed",
        ),
        Mutant(
            "SlotFiles._open",
            "if self._locked:\n    ...",
            "if True:\n    ...",
            "a start that is refused removes the files of the one that runs",
        ),
        # ---- what is lost ---
        Mutant(
            "folder.leads_to",
            "return False",
            "return True",
            "a folder that was removed is not noticed",
        ),
        Mutant(
            "folder.leads_to",
            "return True",
            "return False",
            "a disk that fails counts as a folder that was removed",
        ),
        Mutant(
            "folder.leads_to",
            "os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))",
            "bool(os.stat(path, follow_symlinks=False))",
            "another folder in the place of ours is not noticed",
        ),
        Mutant(
            "SlotFiles.in_place",
            "((INDEX_NAME, self._index), (SLOTS_NAME, self._payload))",
            "((INDEX_NAME, self._index),)",
            "payloads go on into a file that was removed",
        ),
        Mutant(
            "NvmeTier._fill",
            "if not self._look():\n    ...",
            "self._look()\nif False:\n    ...",
            "what nobody will find again is written",
        ),
        Mutant(
            "NvmeTier._look",
            "self._trouble = ''",
            "",
            "trouble that is over is told for ever",
        ),
        Mutant(
            "status.trouble",
            "[*server.trouble.values(), *away, *(text for text in lost if text)]",
            "[*server.trouble.values(), *away]",
            "health does not name a folder that was lost",
        ),
        Mutant(
            "SlotFiles._open",
            "self._tell_of_removed()",
            "pass",
            "who opens the path next is not told who still has the room",
        ),
        # ---- the order of writes ---
        Mutant(
            "NvmeTier._empty",
            "try:\n"
            "    self._files.write_record(slot, EMPTY_RECORD)\n"
            "except OSError as error:\n"
            "    ...",
            "with self._lock:\n"
            "    self._free.append(slot)\n"
            "try:\n"
            "    self._files.write_record(slot, EMPTY_RECORD)\n"
            "    return\n"
            "except OSError as error:\n"
            "    ...",
            "a slot is free before its record is erased: a crash costs a chunk that was "
            "acknowledged",
        ),
    ),
)
