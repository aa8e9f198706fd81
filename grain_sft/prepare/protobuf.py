"""`message_class`: makes a class of protobuf messages at run time.

Code that protoc generates works only with some versions of protobuf, so this package contains no generated code.
"""

import functools
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format


@functools.cache
def message_class(file: str, name: str) -> Any:
    """Return the class of the message `name`, which `file` declares.

    Args:
      file: Content of a .proto file, as the text of a `FileDescriptorProto`.
      name: Full name of the message, with its package.
    """
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(file, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
