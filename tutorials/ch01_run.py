# ---
# title:
#   en: "1. Run it in a minute"
#   zh: "1. 一分钟跑起来"
# outcome:
#   en: a model that writes text on your machine, and a first look at what one step of its engine computes
#   zh: 一个在你的机器上写出文字的模型，并且第一次看清引擎的一步到底算了什么
# minutes: 6
# prerequisites:
#   en: Python; a rough idea of what a language model does
#   zh: 会 Python，大致知道语言模型做什么
# bugs: []
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** Serving a model on an Ascend NPU is mostly a sequence of calls to *fused* operators: each does in one
# kernel what takes several steps in plain PyTorch. Every one of these calls can be made, checked and understood on a
# laptop. trueup makes exactly the calls that an NPU machine makes, `torch.ops.npu.*`. On a laptop a *reference kernel*
# answers them: PyTorch code that computes what the operator's documentation says.
#
# The package brings a small trained model, so nothing has to be downloaded.

# %% [markdown] tags=["zh"] pair="cfc95b-73465b"
# **要点。** 在昇腾 NPU 上提供模型服务，主要就是一连串*融合*算子的调用：普通 PyTorch 里要分几步做的事，一个内核（kernel）就做完。
# 这些调用，每一个都可以在笔记本电脑上执行、检查并弄懂。trueup 用的正是 NPU 机器上的那些调用，即 `torch.ops.npu.*`；
# 在笔记本电脑上，执行它们的是*参考内核*：用 PyTorch 写成，计算算子文档规定的结果。
#
# 软件包自带一个训练好的小模型（后文称 *nano 模型*），所以什么都不用下载。

# %%
from trueup.core.sampling import SamplingParams
from trueup.models import LLM

llm = LLM.from_pretrained("glm-4.7-flash-nano", progress=False)
prompts = ["import os\nimport sys\n\ndef main(", "class Stack:\n    def __init__(self", "for name in sorted("]
completions = llm.generate(prompts, SamplingParams(max_tokens=24))

print(completions[1].prompt + completions[1].text)
assert all(len(completion.token_ids) >= 1 for completion in completions)

# %% [markdown] tags=["en"]
# The text looks like Python and means little: the model has a few million parameters. But it has the structure of
# GLM-4.7-Flash and runs through the same code as that model.
#
# ## One step, looked at
#
# The engine works in *rounds*. In each round it decides which requests run, plans one *forward* (one pass of all their
# rows through the model), runs it, and gives every request its next token. `Engine.step()` does one round and returns
# what it did. Let us add three requests and look at two rounds.

# %% [markdown] tags=["zh"] pair="9a503d-b99fc4"
# 这段文字看上去像 Python，却没有多少意思：模型只有几百万个参数。不过它的结构与 GLM-4.7-Flash 相同，走的也是同一份代码。
#
# ## 细看一步
#
# 引擎按*轮*工作。每一轮它决定运行哪些请求，规划一次*前向*（这些请求的所有行一起过一遍模型），执行，
# 然后为每个请求产出下一个词元。`Engine.step()` 运行一轮，并返回这一轮做了什么。
# 我们加入三个请求，看其中两轮。

# %%
engine = llm.engine
params = SamplingParams(max_tokens=8, ignore_eos=True)
ids = [engine.add(llm.tokenizer.encode(prompt), params) for prompt in prompts]
first, second = engine.step(), engine.step()

for done in (first, second):
    layout = done.layout
    modes = [segment.mode.value for segment in layout.segments]
    print(f"round {done.number}: {modes}, requests {layout.real_requests} of {layout.padded_requests}, "
          f"token rows {layout.real_tokens} of {layout.padded_tokens}")

assert first.layout.real_tokens == sum(len(llm.tokenizer.encode(prompt)) for prompt in prompts)
assert (second.layout.real_requests, second.layout.padded_requests) == (3, 4)

# %% [markdown] tags=["en"]
# (The engine has been counting since it started, and `generate` used the earlier numbers.) The first of the two rounds
# ran the three prompts, all their tokens as rows of one matrix. The second ran one token a request: three rows. But it
# computed **four**. On an NPU, decoding is launched from a *graph*: a sequence of kernels that was recorded once for
# fixed shapes and is replayed, as with CUDA graphs. Graphs are recorded for a few batch sizes only (*buckets*), here 1,
# 2, 4 and 8, so three requests are padded to four. Prompts run without a graph and are not padded. trueup does not
# record graphs yet, but it pads as if it did.
#
# All sizes of one round together are its *layout*. This picture shows that of the second round; dashed boxes are
# padding. A request's *kv length* counts the tokens that attention reads for it, the new one included; its *position*
# is the place of the new token in its text, counted from 0.

# %% [markdown] tags=["zh"] pair="4b9d9f-748505"
# （轮号从引擎启动时数起，前面的号被 `generate` 用掉了。）这两轮中，前一轮是*预填充*（prefill）：
# 三个提示词一起运行，它们的全部词元是同一个矩阵的行。
# 后一轮是*解码*（decode）：每个请求只有一个词元，一共三行，实际却算了**四**行。在 NPU 上，解码靠*计算图*（graph）下发：一串内核按固定的形状录制一次，
# 之后反复重放，与 CUDA Graph 一样。计算图只按少数几种批大小（*桶*）录制，这里是 1、2、4、8，所以三个请求要填充到四个。
# 提示词不走计算图，也不填充。trueup 目前还不录制计算图，但填充方式与录制时一样。
#
# 一轮的全部大小合起来就是它的*布局*。下图是后一轮的布局，虚线框是填充。图中 query rows 是每个请求在这一轮里的行数，
# kv length 是它到这一轮为止的词元总数，position 是这一轮的词元在请求里的位置，slot 见图下的说明。

# %% tags=["fold"]
from trueup.core.picture import boxes

segment = second.layout.segments[0]
style = ["real" if request is not None else "pad" for request in segment.requests]


def row(label, values):
    return label, [(str(value), s) for value, s in zip(values, style, strict=True)]


names = ["dummy" if request is None else f"#{request}" for request in segment.requests]
boxes([row("request [Bp]", names), row("query rows", segment.q_lens), row("kv length", segment.kv_lens),
       row("position [Tp]", segment.positions), row("slot [Tp]", segment.slots)],
      ("Three decoding requests, padded to four: the fourth is an ordinary request on the dummy page.",
       "三个解码中的请求，填充到四个：第四个是哑页上的一个普通请求。"))

# %% [markdown] tags=["en"]
# `Bp` is the padded number of requests, `Tp` that of token rows. The cache is cut into *pages* of 128 rows each, one
# row for each token. A *slot* is the place of a token's row: page number times page size plus offset. Page 0 is the
# *dummy page*: no real request owns it, and padding writes there. (A *segment*, in the code, is the requests of one
# mode.)

# %% [markdown] tags=["zh"] pair="b7f7e1-4b8e29"
# `Bp` 是填充后的请求数，`Tp` 是填充后的词元行数。缓存切成一个个*页*，每页 128 行，一个词元一行。
# *槽位*（slot）是一个词元的行所在的位置：页号乘页大小再加页内偏移。
# 第 0 页是*哑页*：不属于任何真实请求，填充写在那里。（代码里的 *segment*，即*段*，由同一种模式的请求组成，
# 模式就是上面打印出来的 prefill 或 decode；`q_cum` 是逐个请求累加的行数，[第 2 章](ch02_shapes.md)再细讲。）

# %%
page_size = second.layout.page_size
assert segment.requests[3] is None and segment.slots[3] // page_size == 0
assert all(slot // page_size != 0 for slot in segment.slots[:3])
assert segment.q_cum[-1] == second.layout.padded_tokens == 4

# %% [markdown] tags=["en"]
# ## The wrong way
#
# What if a tensor does not fit the others? On a device this ends in an error code from deep inside a kernel, or in a
# wrong number. Here every operator first checks its *contract*, the list of what its arguments must satisfy. A norm
# over 8 channels with 7 weights:

# %% [markdown] tags=["zh"] pair="fe7171-14ea0c"
# ## 错误的做法
#
# 如果一个张量与其他张量对不上呢？在设备上，结果是内核深处报出的一个错误码，或者一个算错的数值。在这里，每个算子先检查自己的*契约*，
# 也就是参数必须满足的条件清单。
# 对 8 个通道做归一化，却给了 7 个权重：

# %% tags=["raises-exception"] raises="ContractError" says="gamma"
import torch

x = torch.randn(3, 8)  # [T, H]
torch.ops.npu.npu_rms_norm(x, torch.ones(7))

# %% [markdown] tags=["en"]
# The message names the operator, the argument, what it got and what it expected, and where the rule is written:
# op-plugin is the repository of torch_npu's operators. RELATION is the kind of rule, sizes that must agree with each
# other; [chapter 4](ch04_operators.md) has the other kinds. With 8 weights the call is right, and its result is what
# the formula says.

# %% [markdown] tags=["zh"] pair="d27863-255637"
# 这条消息说出了算子、参数、收到的和期望的内容，以及规则写在哪里：op-plugin 是 torch_npu 的算子仓库；
# RELATION 是规则的种类，指彼此必须一致的大小，其他种类见[第 4 章](ch04_operators.md)。给 8 个权重，调用就对了，结果与公式一致。

# %%
y, rstd = torch.ops.npu.npu_rms_norm(x, torch.ones(8))  # [T, H], [T, 1]
expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()  # [T, H]
assert torch.allclose(y, expected, atol=1e-5)

# %% [markdown] tags=["en"]
# ## Alone and in a batch
#
# A padded row must not change a real one, and neither may a neighbour. So with greedy sampling, the default here, a
# request gets the same tokens alone and in a batch. It is a test worth running on any engine. (Here the numbers are
# float32. In bfloat16 a batch of another size may round differently, and of two almost equally likely tokens the other
# one may then win.)

# %% [markdown] tags=["zh"] pair="b92ef5-e4a6fb"
# ## 单独跑与成批跑
#
# 填充行不能改变真实行的结果，同一个 batch 里的其他请求也不能。所以在贪心采样（这里的默认方式）下，
# 一个请求单独运行和成批运行，得到的词元必须相同。任何引擎都值得跑一跑这项测试。
# （这里用的是 float32。换成 bfloat16，batch 大小不同，舍入也可能不同；两个词元的概率几乎相等时，胜出的可能就换成另一个。）

# %%
greedy = SamplingParams(max_tokens=12)
together = [completion.token_ids for completion in llm.generate(prompts, greedy)]
alone = [llm.generate(prompt, greedy)[0].token_ids for prompt in prompts]
assert together == alone

# %% [markdown] tags=["en"]
# ## Exercises
#
# **1.** How many padded rows does a round with five decoding requests have?

# %% [markdown] tags=["zh"] pair="2411d3-80e68c"
# ## 练习
#
# **1.** 五个请求在解码的一轮里，有多少行是填充？

# %% tags=["solution"]
five = [engine.add([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True)) for _ in range(5)]
while engine.has_work:
    done = engine.step()
assert done.layout.real_requests == 5
assert done.layout.padded_tokens - done.layout.real_tokens == 3  # the bucket is 8

# %% [markdown] tags=["en"]
# **2.** Where do the cache rows of a finished request go?

# %% [markdown] tags=["zh"] pair="09eb2c-520bbc"
# **2.** 请求结束后，它的缓存行到哪里去了？

# %% [markdown] tags=["en", "solution"]
# Nowhere: its pages are free again, and the rows in them stay until another request writes over them.

# %% [markdown] tags=["zh", "solution"] pair="ec7af9-fa3156"
# 哪儿也没去：它的页重新变为空闲，其中的行一直留着，直到别的请求覆盖它们。

# %% tags=["solution"]
assert engine.pages.free == engine.config.num_pages - 1  # all but the dummy page

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# The same cells are meant to run there unchanged: install `torch_npu` beside the packages, open this notebook, run all
# cells. `trueup doctor` says which kernels answer. No device has run this chapter yet; [what ran
# where](../what-ran-where.md) keeps the account.

# %% [markdown] tags=["zh"] pair="5315fe-e9a87c"
# ## 在 NPU 机器上
#
# 同样的单元格按设计在那里也能原样运行：除这些软件包外再装上 `torch_npu`，打开这个笔记本，运行全部单元格。
# `trueup doctor` 会告诉你由哪些内核执行。本章还没有在任何设备上运行过，详见[哪些在哪里跑过](../what-ran-where.md)。
