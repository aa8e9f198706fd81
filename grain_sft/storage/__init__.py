"""Storage: local and remote files, retries, the shard cache, artifacts, locks, and a record of each thread's activity."""

from grain_sft.storage import activity, artifact, cache_blocks, file_stamp, files, hashing, shard_cache
from grain_sft.storage.atomic_file import temporary_folder
from grain_sft.storage.file_stamp import Count, FileStamp, describe, read_whole
from grain_sft.storage.files import atomic_write, write_bytes
from grain_sft.storage.local_file import MOST_OPEN_FILES
from grain_sft.storage.locks import CACHE_DIR_VARIABLE, ForkSafeLock, HeldLock, exclusive, is_at, without_interrupts
from grain_sft.storage.regular_files import inside, inside_also, outside, read_regular
from grain_sft.storage.remote import files as remote_files
from grain_sft.storage.remote.files import open_remote
from grain_sft.storage.remote_options import SHARD_CACHE_VARIABLE, CacheOptions, RemoteOptions
from grain_sft.storage.remote_shards import identify
from grain_sft.storage.shard_reader import Buffers, RowPieces, ShardReader
from grain_sft.storage.threads import FEW_THREADS, MANY_THREADS, in_threads

__all__ = [
    "CACHE_DIR_VARIABLE", "FEW_THREADS", "MANY_THREADS", "MOST_OPEN_FILES", "SHARD_CACHE_VARIABLE", "Buffers", "CacheOptions",
    "Count", "FileStamp", "ForkSafeLock", "HeldLock", "RemoteOptions", "RowPieces", "ShardReader", "activity", "artifact",
    "atomic_write", "cache_blocks", "describe", "exclusive", "file_stamp", "files", "hashing", "identify", "in_threads",
    "inside", "inside_also", "is_at", "open_remote", "outside", "read_regular", "read_whole", "remote_files", "shard_cache",
    "temporary_folder", "without_interrupts", "write_bytes",
]  # fmt: skip
