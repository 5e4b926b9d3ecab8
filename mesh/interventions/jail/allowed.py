"""What code of keys that are not trusted may name: modules, attributes, builtins. Lists only.

The modules are those of the NDIF allow-list and a few that only compute. Denied names inside them
are doors to files, processes, memory addresses and evaluation; the process wall stands behind all.
"""

from __future__ import annotations


def is_private(name: str) -> bool:
    """Whether it has one underscore in front and none behind; others are Python's, or guards'."""
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


# fmt: off
# Module -> whether its submodules are allowed as well.
MODULES = {
    "torch": False, "torch.nn": True, "torch.linalg": False, "torch.fft": False,
    "torch.special": False, "torch.autograd": False, "torch.autograd.functional": False,
    "torch.distributions": True, "torch.optim": True, "torch.functional": False,
    "numpy": False, "numpy.linalg": False, "numpy.fft": False, "numpy.random": False,
    "collections": True, "math": False, "cmath": False, "time": False, "typing": False,
    "einops": False, "einops.layers": False, "einops.layers.torch": False,
    "sympy": False, "enum": False, "operator": False,
    "_operator": False, "itertools": False, "functools": False, "statistics": False,
    "random": False, "re": False, "json": False, "dataclasses": False, "copy": False,
    "string": False, "decimal": False, "fractions": False, "nnsight": False,
    "nnsight.intervention.envoy": False, "__future__": False, "abc": False,
    "torch.utils.data": False,
    "tqdm": False, "tqdm.std": False, "tqdm.auto": False, "tqdm.asyncio": False,
    "tqdm.notebook": False, "torch.func": False, "heapq": False, "datetime": False,
    "torch.cuda": False, "contextlib": False, "warnings": False, "gc": False, "types": False,
}

# Those of them that a node has only with the extra of the same name.
EXTRAS = frozenset(("einops",))

# Denied on whatever object they are asked for.
DENIED_ANYWHERE = frozenset((
    # files, other code, evaluation
    "save_pretrained", "from_pretrained", "push_to_hub", "tofile", "fromfile", "memmap",
    "from_file", "dump", "from_buffer", "frombuffer", "genfromtxt", "loadtxt", "savetxt", "savez",
    "fromregex",
    "savez_compressed", "DataSource", "ctypeslib", "f2py", "load_library", "to_pickle", "to_csv",
    "to_sql", "to_hdf", "to_parquet", "to_feather", "to_excel", "to_json", "to_html", "to_latex",
    "to_stata", "to_orc", "to_xml", "to_json_file", "exec", "get_type_hints",
    "ForwardRef", "attrgetter", "methodcaller", "sympify", "parse_expr", "lambdify", "preview",
    "save_state_dict", "load_state_dict", "load_adapter", "set_adapter", "from_checkpoint",
    "hub", "jit", "package", "serialization", "multiprocessing", "export", "onnx", "classes", "ops",
    "multiprocessing_context", "library", "profiler", "fx", "overrides", "cpp_extension", "script",
    # addresses and memory that is not this tensor's
    "data_ptr", "untyped_storage", "storage", "typed_storage",
    "set_", "share_memory_", "as_strided", "as_strided_", "as_strided_copy", "ctypes",
    "resize_", "from_dlpack", "to_dlpack", "from_blob", "grad_fn", "next_functions",
    "variable", "ndpointer",
    # what belongs to the process and not to the trace
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_module", "add_module", "set_default_dtype", "set_default_device",
    "set_default_tensor_type", "set_num_threads", "set_num_interop_threads",
    "use_deterministic_algorithms",
    # what an exception or a frame drags along
    "with_traceback", "tb_frame", "tb_next", "obj", "frame", "gr_frame", "mro",
))

# The same on objects; functions of these names are harmless. An array's views do not grow with it.
DENIED_METHODS = frozenset(("resize",))

# In these modules only; the same words are harmless elsewhere (`x.save()`).
DENIED_IN_MODULES = {
    "torch": frozenset((
        "save", "load", "compile", "set_default_dtype", "set_default_device", "get_file_path",
        "prepare_multiprocessing_environment", "set_printoptions", "set_flush_denormal",
        "empty_strided", "classproperty", "typename", "import_ir_module",
    )),
    "numpy": frozenset(("save", "load", "set_printoptions", "show_config", "info", "test")),
    "sympy": frozenset(("S", "plot", "plotting", "test", "doctest", "init_session", "python",
                        "print_python", "source", "N", "simplify_logic", "lazy_function")),
    "json": frozenset(("load", "dump")),
    "operator": frozenset(("setitem", "delitem", "call")),
    "string": frozenset(("Formatter",)),
    "abc": frozenset(("ABCMeta",)),
    "enum": frozenset(("global_enum", "EnumMeta", "EnumType")),
    "copy": frozenset(("copyreg", "dispatch_table")),
}

# In these modules nothing else.
ONLY_IN_MODULES = {
    "torch.cuda": frozenset((
        "is_available", "device_count", "empty_cache", "synchronize", "manual_seed",
        "manual_seed_all", "memory_allocated", "max_memory_allocated", "is_bf16_supported",
    )),
    "contextlib": frozenset(("nullcontext", "contextmanager", "suppress", "ExitStack", "closing")),
    "warnings": frozenset(("warn", "filterwarnings", "simplefilter", "catch_warnings")),
    "gc": frozenset(("collect",)),
    "types": frozenset(("SimpleNamespace",)),
    "nnsight": frozenset(("save", "Envoy", "Object")),
    "nnsight.intervention.envoy": frozenset(("Envoy",)),
    "torch.utils.data": frozenset((
        "BatchSampler", "ChainDataset", "ConcatDataset", "DataLoader", "Dataset",
        "IterableDataset", "RandomSampler", "Sampler", "SequentialSampler", "StackDataset",
        "Subset", "SubsetRandomSampler", "TensorDataset", "WeightedRandomSampler",
        "default_collate", "default_convert", "get_worker_info", "random_split",
    )),
}

# Of what torch has from its compiled part beside its functions, nothing else: the rest are files,
# TorchScript and its parts.
TORCH_COMPILED = frozenset((
    "AcceleratorError", "Event", "Generator", "OutOfMemoryError", "Size", "Stream",
    "default_generator", "device", "dtype", "finfo", "get_autocast_dtype", "get_default_dtype",
    "get_num_threads", "iinfo", "is_autocast_enabled", "is_grad_enabled",
    "is_inference_mode_enabled", "layout", "memory_format", "qscheme",
))

# On a module of the model, nothing else than these, its children and its parameters.
ENVOY = frozenset((
    "output", "input", "inputs", "skip", "next", "source", "save", "trace", "generate", "pipe",
    "session", "scan", "edit", "clear_edits", "iter", "all", "path", "parent", "root", "modules",
    "named_modules", "children", "device", "devices", "dtype", "config", "tokenizer", "generator",
    "streamer", "result", "export_edits", "import_edits", "get", "weight", "bias",
))
ENVOY_WRITABLE = frozenset(("output", "input", "inputs"))
TRACER = frozenset((
    "stop", "result", "iter", "all", "barrier", "cache", "invoke", "next", "save",
))

# On nnsight's other objects (caches, source operations): these, and whatever is plain data.
NNSIGHT = ENVOY | TRACER | frozenset(("keys", "values", "items", "fn", "n"))

BUILTINS = (
    "abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "callable", "chr",
    "classmethod", "complex", "dict", "divmod", "enumerate", "filter", "float", "frozenset", "hash",
    "hex", "id", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min",
    "next", "object", "oct", "ord", "pow", "print", "property", "range", "repr", "reversed",
    "round", "set", "slice", "sorted", "staticmethod", "str", "sum", "super", "tuple", "zip",
    "None", "True", "False", "Ellipsis", "NotImplemented", "__build_class__",
)

# Dunder methods a class may define and a call may name.
DUNDERS = frozenset(
    f"__{name}__" for name in (
        "init", "call", "len", "iter", "next", "getitem", "setitem", "delitem", "contains", "enter",
        "exit", "repr", "str", "bool", "hash", "eq", "ne", "lt", "le", "gt", "ge", "add", "radd",
        "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "matmul", "rmatmul", "truediv",
        "rtruediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "invert", "and", "or", "xor",
        "name", "doc", "post_init",
    )
)

# What rewritten code calls; see `names.guarded_builtins`.
GUARDS = frozenset((
    "__metaclass__", "_getattr_", "_getitem_", "_getiter_", "_write_", "_inplacevar_", "_import_",
    "_import_from_", "_unpack_sequence_", "_iter_unpack_sequence_", "_match_sequence_",
    "_match_mapping_", "_match_class_",
))

# Names with two underscores that a class may be given beside its methods.
CLASS_NAMES = frozenset(("__match_args__", "__slots__"))

# What named tuples call their methods, because their fields have the plain names.
NAMED_TUPLE = frozenset(("_asdict", "_fields", "_field_defaults", "_make", "_replace"))

# Modules whose classes put nothing of their own into the objects of classes derived from them.
PLAIN_BASES = ("builtins", "typing", "abc", "collections.abc", "torch.nn.modules.")

# What a payload may be made of when it is unpickled: exact names, and roots with all below them.
PICKLED_ROOTS = ("nnsight.intervention", "nnsight.tracing", "nnsight.modeling")
PICKLED = frozenset((
    "collections.OrderedDict", "collections.defaultdict", "collections.deque",
    "collections.Counter", "builtins.set", "builtins.frozenset", "builtins.slice", "builtins.range",
    "builtins.complex", "builtins.bytearray", "builtins.object", "builtins.int", "builtins.float",
    "builtins.str", "builtins.list", "builtins.dict", "builtins.tuple", "builtins.bool",
    "builtins.bytes", "builtins.type", "builtins.property", "builtins.staticmethod",
    "builtins.classmethod", "types.MethodType",
    "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter", "torch.Size", "torch.device",
    "torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter",
    "torch.Tensor", "torch.serialization._get_layout",
    "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar", "numpy.ndarray",
    "numpy.dtype", "numpy.core.multiarray._reconstruct", "numpy._core.numeric._frombuffer",
    "numpy.random._pickle.__generator_ctor", "numpy.random._pickle.__bit_generator_ctor",
    "numpy.random._pcg64.PCG64", "numpy.random.bit_generator.SeedSequence",
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
    "nnsight.intervention.serialization._load_function",
    "nnsight.modeling.transformers.TransformersModel._call",
    "cloudpickle.cloudpickle._make_skeleton_enum", "cloudpickle.cloudpickle._builtin_type",
    "cloudpickle.cloudpickle._make_empty_cell", "cloudpickle.cloudpickle._make_cell",
    "tokenizers.Encoding", "abc.ABCMeta", "enum.EnumType", "enum.EnumMeta", "enum.Enum",
    # What `dataclass` writes down in a class, beside methods that nobody has the source of.
    "dataclasses.Field", "types.MappingProxyType",
    "cloudpickle.cloudpickle._get_dataclass_field_type_sentinel",
))

# Where the rest of what code may import is defined, if not where it is imported from.
DEFINED_IN = {
    "torch._C._nn": "torch.nn.functional", "torch.autograd.function": "torch.autograd",
    "torch.utils.data.dataloader": "torch.utils.data",
    "torch.utils.data.dataset": "torch.utils.data",
    "torch.utils.data.sampler": "torch.utils.data",
    "torch.utils.data._utils.collate": "torch.utils.data",
}
# fmt: on
