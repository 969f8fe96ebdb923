"""Encodes text in this process or, for a large corpus, in several at once, with the same ids in the same order.

Text travels in jobs of about 1 MiB: UTF-8 in which the byte 0xFE ends a chunk and 0xFF a document. UTF-8 has neither.

The processes are started with `python -m data.workers` and not with multiprocessing: its spawn would import the main
script, and so torch, in each of them; its fork is unsafe once torch has started threads; and neither ends its processes
when this one is killed. These end when their standard input does, so none outlives this process.
"""

import json
import os
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import numpy as np

from data.tokenizer import ByteTokenizer, PretrainedTokenizer, SentencePieceTokenizer, Tokenizer

JOB_BYTES = 1 << 20
CHUNK_END, DOCUMENT_END = b"\xfe", b"\xff"
MAX_WORKERS = 32  # one process reads the text for all
SIZE = struct.Struct("<Q")  # precedes every message

Worker = subprocess.Popen[bytes]


def available_cpus() -> int:
    """The CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_jobs(documents: Iterable[Iterable[str]]) -> Iterator[bytes]:
    """The text of the documents in jobs. They depend on the text alone, not on who encodes them."""
    job = bytearray()
    for document in documents:
        for chunk in document:
            job += chunk.encode() + CHUNK_END
            if len(job) >= JOB_BYTES:
                yield bytes(job)
                job.clear()
        job += DOCUMENT_END
    if job:
        yield bytes(job)


def text_of(job: bytes) -> bytes:
    """The UTF-8 text of a job."""
    return job.translate(None, CHUNK_END + DOCUMENT_END)


def encode_job(job: bytes, tokenizer: Tokenizer, dtype: np.dtype) -> bytes:
    """The ids of a job, each document followed by the end-of-document id, as the bytes of an array of `dtype`."""
    ids = [np.zeros(0, dtype)]
    for number, document in enumerate(job.split(DOCUMENT_END)):
        if number:
            ids.append(np.array([tokenizer.end_of_document], dtype))
        ids += [tokenizer.encode_array(chunk.decode(), dtype) for chunk in document.split(CHUNK_END) if chunk]
    return np.concatenate(ids).tobytes()


def encode_jobs(
    jobs: Iterable[bytes], tokenizer: Tokenizer, dtype: np.dtype, workers: int
) -> Generator[tuple[bytes, bytes], None, None]:
    """Each job with its ids, in order. Encodes here if `workers` is 1, which the byte tokenizer needs.

    Raises ChildProcessError if a process ends before its work does. Close the iterator to end the processes.
    """
    if workers == 1:
        for job in jobs:
            yield job, encode_job(job, tokenizer, dtype)
        return
    assert not isinstance(tokenizer, ByteTokenizer)
    processes: list[Worker] = []
    idle: SimpleQueue[Worker] = SimpleQueue()
    pending: deque[tuple[bytes, Future[bytes]]] = deque()
    threads = ThreadPoolExecutor(workers)  # each waits for one process at a time
    try:
        for _ in range(workers):
            processes.append(_start(dtype))
            idle.put(processes[-1])
        for process in processes:
            _request(process, _packed(tokenizer))
        for job in jobs:
            pending.append((job, threads.submit(_encode_elsewhere, idle, job)))
            if len(pending) > 2 * workers:
                job, ids = pending.popleft()
                yield job, ids.result()
        while pending:
            job, ids = pending.popleft()
            yield job, ids.result()
    finally:
        for process in processes:
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.communicate()  # closes its pipes and waits for it


def _start(dtype: np.dtype) -> Worker:
    command = [sys.executable, "-m", "data.workers", dtype.str]
    return subprocess.Popen(
        command,
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process only, which ends the others
    )


def _encode_elsewhere(idle: SimpleQueue[Worker], job: bytes) -> bytes:
    process = idle.get()
    try:
        return _request(process, job)
    finally:
        idle.put(process)  # even if it has ended, so that no thread waits forever


def _request(process: Worker, message: bytes) -> bytes:
    assert process.stdin and process.stdout
    try:
        _send(process.stdin, message)
        reply = _receive(process.stdout)
    except BrokenPipeError:
        reply = None
    if reply is None:
        code = process.wait()
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ChildProcessError(f"a process that encodes the text {reason}; the same command continues from there")
    return reply


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(SIZE.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """The next message, or None if the other side has ended."""
    head = pipe.read(SIZE.size)
    if len(head) < SIZE.size:
        return None
    (size,) = SIZE.unpack(head)
    message = pipe.read(size)
    return message if len(message) == size else None


def _packed(tokenizer: SentencePieceTokenizer | PretrainedTokenizer) -> bytes:
    """A line of JSON that says how to make the tokenizer, then its model."""
    arguments: dict[str, Any] = {"threads": 1}
    if isinstance(tokenizer, PretrainedTokenizer):
        arguments = {"file": tokenizer.file, "end": tokenizer.end_of_document, "added": tokenizer.added}
    return json.dumps(arguments).encode() + b"\n" + tokenizer.model


def _unpacked(message: bytes) -> Tokenizer:
    line, _, model = message.partition(b"\n")
    arguments = json.loads(line)
    return (PretrainedTokenizer if "file" in arguments else SentencePieceTokenizer)(model=model, **arguments)


def _serve(requests: IO[bytes], replies: IO[bytes], dtype: np.dtype) -> None:
    """Receive a tokenizer, then jobs, and reply with their ids until there are no more requests."""
    packed = _receive(requests)
    if packed is None:
        return
    tokenizer = _unpacked(packed)
    _send(replies, b"")
    while (job := _receive(requests)) is not None:
        _send(replies, encode_job(job, tokenizer, dtype))


if __name__ == "__main__":
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer, np.dtype(sys.argv[1]))
    except BrokenPipeError:  # the process that asked was killed
        os._exit(1)  # Python would try to flush once more
