"""What devices and frameworks say, and what it means: the table behind ``trueup explain`` and its page of the book.

One entry a message, in both languages of the book.  Add one with the text as it was really seen, and where.
"""
from trueup.core.messages import attention, caches, environment, runtime
from trueup.core.messages.entry import Message, Text

# In this order: where several fit, the ones that name a cause come first.
GROUPS: dict[str, tuple[Text, tuple[Message, ...]]] = {
    "attention": (Text("Attention", "注意力"), attention.MESSAGES),
    "caches": (Text("Cache writes, rotary embedding and matmul", "缓存写入、旋转位置编码与矩阵乘"), caches.MESSAGES),
    "environment": (Text("Installation", "安装环境"), environment.MESSAGES),
    "runtime": (Text("Graphs and bare error codes", "计算图与只有错误码的报错"), runtime.MESSAGES),
}
MESSAGES = tuple(message for _, messages in GROUPS.values() for message in messages)

__all__ = ["GROUPS", "MESSAGES", "Message", "Text"]
