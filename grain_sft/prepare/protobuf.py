"""Classes of protobuf messages, made at run time: code that protoc generates would work with few versions of protobuf."""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format


def message_class(file: str, name: str) -> Any:
    """Return the class of the message `name` in `file`, the text format of a `FileDescriptorProto`."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(file, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
