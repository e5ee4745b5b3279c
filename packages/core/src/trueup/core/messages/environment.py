"""Messages of an installation that does not fit together."""
from trueup.core.messages.entry import Message, Text

DOCTOR = ("how-to/doctor/",)

MESSAGES = (
    Message(
        "no-driver", Text("A library of CANN or the driver is not found", "找不到 CANN 或驱动的库"),
        r"(?P<library>lib(?:ascend_hal|ascendcl|hccl|atb|runtime|opapi)\.so)\S*: cannot open shared object file",
        "libascend_hal.so: cannot open shared object file: No such file or directory", "vllm-ascend issue #1440",
        Text("The loader does not find {library}: no driver is installed, or its folder is not on the path.",
             "加载器找不到 {library}：没有装驱动，或者它所在的目录不在搜索路径里。"),
        Text("On a machine with an NPU: source set_env.sh of CANN; in a container mount the driver and its device "
             "files. Without an NPU: `import trueup.core` first, which puts stand-ins in the place of the libraries.",
             "有 NPU 的机器：source CANN 的 set_env.sh；容器里要挂载驱动和设备文件。没有 NPU 的机器：先 `import "
             "trueup.core`，"
             "它会用替身顶上这些库。"),
        pages=DOCTOR),
    Message(
        "autoload", Text("import torch fails because of torch_npu", "torch_npu 导致 import torch 失败"),
        r"Failed to load the backend extension: torch_npu",
        "RuntimeError: Failed to load the backend extension: torch_npu. You can disable extension auto-loading with "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0.", "vllm-ascend issue #1440",
        Text("torch imports every installed backend at once, and torch_npu cannot be imported here; the reason stands "
             "above this line.",
             "torch 启动时会导入所有已安装的后端，而 torch_npu 在这里无法导入；原因在这一行的上面。"),
        Text("Mend what the lines above name (mostly a missing driver). Where there is no NPU: set "
             "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or `import trueup.core` before torch.",
             "修好上面几行指出的问题（多半是缺驱动）。没有 NPU 的地方：设 TORCH_DEVICE_BACKEND_AUTOLOAD=0，"
             "或者在 torch 之前 `import trueup.core`。"),
        pages=DOCTOR),
    Message(
        "no-cpu-kernel", Text("An NPU operator got CPU tensors", "NPU 算子收到了 CPU 张量"),
        r"Could not run '(?:npu|atb)::(?P<operator>\w+)' with arguments from the '(?P<backend>\w+)' backend",
        "NotImplementedError: Could not run 'npu::npu_rotary_mul' with arguments from the 'CPU' backend.",
        "torch_npu 2.13.0 on a machine without an NPU",
        Text("{operator} has no kernel for {backend} tensors in this process.",
             "{operator} 在当前进程里没有针对 {backend} 张量的内核。"),
        Text("On a laptop: call `trueup.core.load()`, which registers kernels for the CPU. On a device: a tensor was "
             "never moved to it.",
             "笔记本电脑上：调用 `trueup.core.load()`，它会注册 CPU 的内核。设备上：有张量没有搬到设备上。"),
        pages=("how-to/check-your-call/", "operators/")),
    Message(
        "no-meta-kernel", Text("An operator without shape inference was traced", "追踪到了没有形状推断的算子"),
        r"(?:npu|atb)(?:::|\.)(?P<operator>\w+?)(?:\.default)?: attempted to run this operator with Meta tensors|"
        r"UnsupportedOperatorException: (?:npu|atb)\.(?P<traced>\w+)",
        "NotImplementedError: npu::_npu_fused_infer_attention_score_get_max_workspace: attempted to run this operator "
        "with Meta tensors, but there was no fake impl or Meta kernel registered.", "torch_npu 2.13.0",
        Text("It has no Meta kernel, so tracing (torch.compile, fake tensors) cannot pass it.",
             "该算子没有 Meta 内核，所以追踪（torch.compile、假张量）过不去。"),
        Text("Call it outside the traced region: get_max_workspace and the .out forms are for graph capture, which "
             "runs on real tensors. The list of operators says which have a Meta kernel.",
             "放到被追踪的区域之外调用：get_max_workspace 和 .out 形式是录制计算图用的，录制时用的是真实张量。"
             "算子一览里写明了哪些有 Meta 内核。"),
        pages=("operators/",)),
    Message(
        "old-cann", Text("CANN does not have this operator", "CANN 里没有这个算子"),
        r"(?P<call>aclnn\w+) or \w+GetWorkspaceSize not in libopapi\.so",
        "RuntimeError: aclnnLightningIndexer or aclnnLightningIndexerGetWorkspaceSize not in libopapi.so, or "
        "libopapi.sonot found.", "vllm-ascend issue #5056",
        Text("torch_npu calls {call}, which the installed CANN does not have.",
             "torch_npu 要调用 {call}，而所装的 CANN 里没有。"),
        Text("Install the CANN that this torch_npu was built for; `trueup doctor` prints both versions.",
             "安装与该 torch_npu 配套的 CANN；`trueup doctor` 会打印两者的版本。"),
        pages=DOCTOR),
)
