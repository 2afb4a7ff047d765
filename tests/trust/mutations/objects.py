"""What is believed of an object store, what is kept there, and what its faults may cost."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_BUCKET = "extensions/objects/bucket.py"
_CHILD = "extensions/objects/child.py"
_LIBRARY = "tiers/library_process.py"
_MAIN = "tiers/library_main.py"
_LAYOUT = "tiers/object_layout.py"
_TIER = "extensions/objects/tier.py"
_WHOLE = "tiers/whole_objects.py"
_AWAY = "tiers/away.py"

ROOM = Room(
    {
        "hostile": (*PYTEST, "tests/unit/extensions/objects/test_hostile_bucket.py"),
        "library": (*PYTEST, "tests/unit/tiers/test_library_process.py"),
        "corruption": ("-m", "tests.trust", "--only", "objects"),
        "faults": (*PYTEST, "tests/fault/test_object_faults.py", "-m", "not slow"),
        "tier": (*PYTEST, "tests/contract/test_object_tier.py", "-m", "not slow"),
        "store": (
            *PYTEST,
            "tests/integration/test_object_store.py",
            "-k",
            "clear or sealed or plan",
        ),
        "plan": (*PYTEST, "tests/unit/autoconfig/test_plan.py", "-k", "bucket"),
    },
    (
        # ---- a chunk ----
        Mutant(
            _WHOLE,
            "        if found == header(key, into):",
            "        if found:",
            "a wrong checksum is believed",
        ),
        Mutant(
            _LAYOUT,
            "    digest.update(payload)\n",
            "",
            "a wrong byte of a payload is served",
        ),
        Mutant(
            _CHILD,
            "            if taken.nbytes > left.nbytes:\n                return False",
            "            if taken.nbytes > left.nbytes:\n                return True",
            "an object that is longer than it says is taken",
        ),
        Mutant(
            _WHOLE,
            '        self._events.log_first("corrupt", key.hex())\n        self.delete(key)\n',
            '        self._events.log_first("corrupt", key.hex())\n',
            "a damaged chunk is read again and again",
        ),
        Mutant(
            _WHOLE,
            '            self._events.add("misses")\n            return False',
            '            self._events.add("misses")\n            return True',
            "a chunk that is not there is a hit",
        ),
        Mutant(
            _CHILD,
            (
                "            answer = obstore.get(self._store, name)\n"
                "        except FileNotFoundError:\n"
                "            return None"
            ),
            (
                "            answer = obstore.get(self._store, name)\n"
                "        except FileNotFoundError:\n"
                "            return False"
            ),
            "a chunk that a lifecycle rule took counts as corrupt",
        ),
        # ---- a hostile bucket ----
        Mutant(
            _BUCKET,
            "        limit_s = _ANSWER_S + chunk_bytes // _SLOWEST\n",
            "        limit_s = 100 * (_ANSWER_S + chunk_bytes // _SLOWEST)\n",
            "a bucket that drips holds a lane",
        ),
        Mutant(
            _CHILD,
            "in answer.stream(_PIECE_BYTES):",
            "in [answer.bytes()]:",
            "an object without end takes all memory",
        ),
        Mutant(
            _BUCKET,
            '            client |= {"proxy_url": _NOWHERE, "proxy_excludes": ",".join(hosts)}',
            "            pass",
            "a redirect of the endpoint reaches any host",
        ),
        Mutant(
            _BUCKET,
            "lambda: setup, _BEGIN_S, _MOST_BYTES",
            "lambda: setup, _BEGIN_S",
            "a refusal without end takes all memory",
        ),
        Mutant(
            _MAIN,
            "str(error)[:_MOST_TEXT]",
            "str(error)",
            "all of a refusal comes into the engine",
        ),
        Mutant(
            _LIBRARY,
            "        self._kill()\n        raise LibraryError(why)",
            "        raise LibraryError(why)",
            "what a call that was given up answers is taken for the next one's",
        ),
        # ---- the library's process ----
        Mutant(
            _LIBRARY,
            "connection.recv_bytes(_MOST_ANSWER)",
            "connection.recv_bytes()",
            "an answer without end takes all memory",
        ),
        Mutant(
            _LIBRARY,
            "socket.SO_RCVTIMEO, limit",
            "socket.SO_RCVTIMEO, bytes(16)",
            "half an answer is waited for without end",
        ),
        Mutant(
            _LIBRARY,
            "socket.SO_SNDTIMEO, limit",
            "socket.SO_SNDTIMEO, bytes(16)",
            "a process that takes no question holds a lane",
        ),
        Mutant(
            _LIBRARY,
            "if self._process is None or self._process.over:",
            "if self._process is None:",
            "a library that crashed once is never used again",
        ),
        Mutant(
            _LIBRARY,
            "            self._kill()\n            raise\n",
            "            raise\n",
            "the answer to a call that was broken off is taken for the next one's",
        ),
        Mutant(
            _LIBRARY,
            "index * room : (index + 1) * room",
            ":room",
            "two calls at once write into each other's chunks",
        ),
        Mutant(
            _LIBRARY,
            'raise LibraryError(f"{self._library.name}\'s library fails ({kind})", kind, text)',
            'raise LibraryError(f"{self._library.name}\'s library fails ({text})", kind, text)',
            "an answer with a secret in it is logged",
        ),
        Mutant(
            _MAIN,
            "resource.RLIMIT_DATA, (most, most)",
            "resource.RLIMIT_DATA, (-1, -1)",
            "a flood takes the host's memory",
        ),
        Mutant(
            _MAIN,
            "resource.RLIMIT_CORE, (0, 0)",
            "resource.RLIMIT_CORE, (-1, -1)",
            "a crash leaves chunks in a file on the disk",
        ),
        Mutant(
            _MAIN,
            "        if os.getppid() != parent:",
            "        if not os.getppid():",
            "a library outlives the engine that it served",
        ),
        Mutant(
            _MAIN,
            "        except Exception as error:  # noqa: BLE001 - whatever it is, it is told\n"
            "            answer = _fault(error)",
            "        except OSError as error:\n            answer = _fault(error)",
            "an error of the library ends its call for ever",
        ),
        Mutant(
            _CHILD,
            "[seat * self._room :][:length]",
            "[:length]",
            "two requests at once read into each other's chunks",
        ),
        Mutant(
            _CHILD,
            '                if len(each["path"]) <= _MOST_NAME\n',
            "",
            "one long name costs all of a list",
        ),
        Mutant(
            _CHILD,
            "            attributes=attributes,\n",
            "            attributes=None,\n",
            "no object says whose it is, and no tenant can drop its own",
        ),
        # ---- writes and deletes ----
        Mutant(
            _CHILD,
            "            self._place(seat, length),\n            use_multipart",
            "            self._place(seat, length)[:80],\n            use_multipart",
            "a part of a chunk is visible as a whole one",
        ),
        Mutant(
            _BUCKET,
            "attributes, length >= _MULTIPART_BYTES)",
            "attributes, False)",
            "a chunk of gigabytes goes in one request, which is over its time",
        ),
        Mutant(
            _WHOLE,
            "            self._owed.add([key])  # it may be there all the same",
            "            pass  # it may be there all the same",
            "an object whose write was not confirmed stays for ever",
        ),
        Mutant(
            _WHOLE,
            "an answer that was lost\n            return False",
            "an answer that was lost\n            return True",
            "a write that failed counts as done",
        ),
        Mutant(
            _WHOLE,
            "        if not self._owed.cancel(key):",
            "        if False:",
            "what is written anew is deleted by what was owed",
        ),
        Mutant(
            _WHOLE,
            "settle=False) is None:\n                self._owed.add(keys)",
            "settle=False) is None:\n                pass",
            "deletes that were not done are forgotten",
        ),
        Mutant(
            _AWAY,
            "            self._owed.make_good()",
            "            pass",
            "owed deletes are never made good",
        ),
        Mutant(
            _CHILD,
            "            obstore.delete(self._store, name)",
            "            obstore.head(self._store, name)",
            "nothing is ever deleted",
        ),
        Mutant(
            _TIER,
            "                if whose is not None and may(owner, whose, shared=True)\n",
            "                if whose is not None\n",
            "a purge of one tenant deletes everyone's objects",
        ),
        Mutant(
            _TIER,
            "            return list(stamps), whole\n",
            "            return [], True\n",
            "a purge leaves what other hosts wrote, and says that nothing is left",
        ),
        Mutant(
            _TIER,
            "                return stamps, found is not None",
            "                return stamps, True",
            "a search that a fault cut short is said to be whole",
        ),
        Mutant(
            _TIER,
            "        return stamps, False\n",
            "        return stamps, True\n",
            "a search that is cut by its bounds is said to be whole",
        ),
        Mutant(
            _WHOLE,
            "        if self._deletions.begun != ended:\n",
            "        if False:\n",
            "a read beside a deletion deletes what was written there since",
        ),
        Mutant(
            _TIER,
            "self._clock() < until and len(stamps)",
            "len(stamps)",
            "a list without end holds up the start",
        ),
        # ---- looking up ----
        Mutant(
            _TIER,
            "is None:\n                return held\n",
            "is None:\n                there = True\n",
            "an error in a search is taken for a hit",
        ),
        Mutant(
            _TIER,
            "enumerate(keys) if not self._has(key)), len(keys))",
            "enumerate(keys) if self._has(key) is False), len(keys))",
            "of a short run an error is taken for a hit",
        ),
        Mutant(
            _TIER,
            "        if not self._has(keys[0]):\n            return 0\n",
            "        if self._has(keys[0]) is False:\n            return 0\n",
            "of a long run an error is taken for a hit",
        ),
        Mutant(
            _CHILD,
            "        except FileNotFoundError:\n            return False",
            "        except FileNotFoundError:\n            return True",
            "a lookup believes what is gone to be there",
        ),
        Mutant(
            _TIER,
            "        held, missing = 1, len(keys) + 1",
            "        held, missing = 1, len(keys)",
            "the last chunk of a run is never found",
        ),
        Mutant(
            _TIER,
            "_ALL_ASKED = 8",
            "_ALL_ASKED = 128",
            "a lookup costs a request for each chunk",
        ),
        Mutant(_AWAY, "    shared = True", "    shared = False", "no host finds another's chunks"),
        # ---- whose objects, and how many ----
        Mutant(
            _LAYOUT,
            'f"kvtier-{FORMAT_VERSION}/{namespace.hex()}"',
            'f"kvtier-{FORMAT_VERSION}/"',
            "another layout's objects are recovered and deleted",
        ),
        Mutant(
            _LAYOUT,
            '            f"{prefix}/" if prefix else ""\n',
            '            ""\n',
            "chunks lie outside the prefix that rights and rules are for",
        ),
        Mutant(
            _LAYOUT,
            "        return found if found.hex() == text else None",
            "        return found",
            "names of strangers are taken for chunks",
        ),
        Mutant(
            "extensions/objects/parts.py",
            "ObjectForm(bucket.url.prefix, around.namespace)",
            "ObjectForm(bucket.url.prefix, around.namespace[:8])",
            "servers with different keys meet in a bucket and delete each other's chunks",
        ),
        Mutant(
            "assemble.py",
            "if lower.name == _REMOTE else rest.sealed(opened.tier)",
            "if lower.name == _REMOTE else opened.tier",
            "chunks lie in the bucket in the clear though a key is given",
        ),
        Mutant(
            _WHOLE,
            "        self.capacity = bytes_ // self.chunk_room",
            "        self.capacity = bytes_ // chunk_bytes",
            "more is kept than the budget",
        ),
        Mutant(
            _AWAY,
            "        return order[-self.capacity :]",
            "        return order",
            "after a start more is held than the budget",
        ),
        Mutant(
            _TIER,
            "key is not None and HEADER_BYTES < size <= self.chunk_room:",
            "key is not None:",
            "objects that can be no chunk count against the budget",
        ),
        # ---- faults ----
        Mutant(
            _WHOLE,
            "        if self._closed or not self._breaker.allows():",
            "        if self._closed:",
            "a store that is dead is asked by every request",
        ),
        Mutant(
            _WHOLE,
            "        return self._breaker.reserves()",
            "        return True",
            "reads from a store that is away take slots from everybody",
        ),
        Mutant(
            _WHOLE,
            "            store.greet(form.folder)\n        except store.faults as error:\n"
            '            self._failed(self._breaker, "failed_finds", store.told(error))',
            "            store.greet(form.folder)\n        except store.faults as error:\n"
            '            raise RuntimeError("away") from error',
            "a store that is away ends the start",
        ),
        # ---- words at the start ----
        Mutant(
            _BUCKET,
            "        if back is None or bytes(back) != text:",
            "        if back is None:",
            "a store that gives other bytes than were written is used",
        ),
        Mutant(
            _BUCKET,
            "            if (reason := self.hopeless(error)) is not None:\n",
            "            if (reason := None) is not None:\n",
            "wrong credentials are waited for without end",
        ),
        Mutant(
            _BUCKET,
            '    "RequestTimeTooSkewed": "this host\'s clock',
            '    "RequestTimeTooSkewed ": "this host\'s clock',
            "a wrong clock is called wrong credentials",
        ),
        Mutant(
            _BUCKET,
            '    if code or status:\n        return " ".join(',
            '    if code or status:\n        return error.text + " ".join(',
            "an answer with a secret in it is logged",
        ),
        Mutant(
            _BUCKET,
            "            finally:\n                self.delete([trial])",
            "            finally:\n                pass",
            "each start leaves an object behind",
        ),
        # ---- the plan ----
        Mutant(
            "extensions/objects/plan.py",
            "    wait = _BEFORE_FIRST * (latency.value or 0.0)",
            "    wait = 0.0",
            "the plan believes a bucket to answer at once",
        ),
        Mutant(
            "extensions/objects/plan.py",
            "    if not store.reachable.value:\n        return draft.leave_out(",
            "    if False:\n        return draft.leave_out(",
            "the plan has a bucket that cannot be reached",
        ),
    ),
)
