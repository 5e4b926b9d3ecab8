"""Hostile job bodies, by class. Each does its deed and, only if it worked, leaves proof.

Proof is one of the planted traps (a file, a connection, a hurt victim), the planted secret in what
comes out, or `proof()`, which a body reaches only behind its deed. `T` holds where the traps are.
Every deed is bounded here as well: a jail that fails must not take the machine with it.
"""

# ruff: noqa: E501 - a body reads best on its line

from __future__ import annotations

# Each section: "## class", then bodies: "# name" and code. `loot` is what the job returns.
_TEXT = r"""
## execution
# os_system
os.system(f"echo {T.nonce} > {T.out}")
# subprocess_run
loot = subprocess.run(["/bin/echo", T.nonce], capture_output=True, timeout=5).stdout
# subprocess_shell
loot = subprocess.check_output(f"cat {T.secret_path}", shell=True, timeout=5)
# os_popen
loot = os.popen(f"cat {T.secret_path}").read()
# posix_spawn
os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", f"echo x > {T.out}"], {}), 0)
# execv
os.dup2(channel.fileno(), 9); os.execv("/bin/sh", ["sh", "-c", f"echo {T.nonce} >&9"])
# execve_by_descriptor
os.dup2(channel.fileno(), 9); os.execve(os.open("/bin/sh", os.O_RDONLY), ["sh", "-c", f"echo {T.nonce} >&9"], {})
# fork
if os.fork() == 0: proof(); os._exit(0)
os.wait()
# fork_and_leave
if os.fork() == 0:
    os.setsid(); time.sleep(0.3); proof(); os._exit(0)
time.sleep(0.6)
# raw_fork
if syscall(57) == 0: proof(); os._exit(0)
time.sleep(0.2)
# raw_clone
if syscall(56, 17, 0, 0, 0, 0) == 0: proof(); os._exit(0)
time.sleep(0.2)
# libc_system
ctypes.CDLL(None).system(f"echo x > {T.out}".encode())
# multiprocessing
import multiprocessing as mp
p = mp.get_context("fork").Process(target=proof); p.start(); p.join(5)
# pty
import pty
pid, fd = pty.fork()
if pid == 0: proof(); os._exit(0)
os.waitpid(pid, 0)
# asyncio_subprocess
import asyncio
async def go():
    p = await asyncio.create_subprocess_exec("/bin/echo", T.nonce, stdout=-1); return await p.stdout.read()
loot = asyncio.run(go())
# memfd_exec
fd = os.memfd_create("x", 0); os.write(fd, open("/bin/echo", "rb").read())
os.dup2(channel.fileno(), 1); os.execve(fd, ["echo", T.nonce], {})
# thread
t = threading.Thread(target=proof); t.start(); t.join()
# raw_thread
import _thread
_thread.start_new_thread(proof, ()); time.sleep(0.2)
# thread_pool
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(1).submit(proof).result()
# code_in_memory
m = mmap.mmap(-1, 4096, prot=7); m.write(CODE42)
if call(m) == 42: proof()
# code_made_executable
m = mmap.mmap(-1, 4096); m.write(CODE42)
if ctypes.CDLL(None).mprotect(address(m), 4096, 7) == 0 and call(m) == 42: proof()
# code_by_pkey
m = mmap.mmap(-1, 4096); m.write(CODE42)
if syscall(329, address(m), 4096, 7, -1) == 0 and call(m) == 42: proof()
# load_library
ctypes.CDLL(T.libraries[0]); proof()
# foreign_syscall_table
if syscall(0x40000000 | 39) == os.getpid(): proof()

## file_read
# open
loot = open(T.secret_path).read()
# os_open
loot = os.read(os.open(T.secret_path, os.O_RDONLY), 99)
# raw_open
fd = syscall(2, T.secret_path.encode(), 0); loot = os.read(fd, 99)
# openat2
how = ctypes.create_string_buffer(struct.pack("QQQ", 0, 0, 0)); fd = syscall(437, -100, T.secret_path.encode(), how, 24); loot = os.read(fd, 99)
# fileio
import _io
loot = _io.FileIO(T.secret_path).readall()
# open_code
import io
loot = io.open_code(T.secret_path).read()
# linecache
import linecache
loot = "".join(linecache.getlines(T.secret_path))
# loader_get_data
import importlib.machinery
loot = importlib.machinery.SourceFileLoader("x", T.secret_path).get_data(T.secret_path)
# import_planted_module
sys.path.insert(0, T.folder); import planted_module; loot = planted_module.SECRET
# torch_from_file
loot = bytes(torch.from_file(T.secret_path, size=32, dtype=torch.uint8).tolist())
# storage_from_file
loot = bytes(torch.UntypedStorage.from_file(T.secret_path, False, 32).tolist())
# numpy_fromfile
loot = np.fromfile(T.secret_path, dtype=np.uint8).tobytes()
# numpy_memmap
loot = np.memmap(T.secret_path, mode="r").tobytes()
# numpy_genfromtxt
loot = str(np.genfromtxt(T.secret_path, dtype=str))
# file_input
import fileinput
loot = "".join(fileinput.input([T.secret_path]))
# tokenize
import tokenize
loot = tokenize.open(T.secret_path).read()
# config_parser
import shutil
shutil.copyfileobj(open(T.secret_path, "rb"), (b := __import__("io").BytesIO())); loot = b.getvalue()
# through_proc_root
loot = open("/proc/self/root" + T.secret_path).read()
# through_cwd
os.chdir(T.folder); loot = open("secret").read()
# list_directory
loot = str(os.listdir(T.folder + "/listing"))
# scan_directory
loot = str([e.name for e in os.scandir(T.folder + "/listing")])
# glob
import glob
loot = str(glob.glob(T.folder + "/listing/*"))
# readlink
loot = os.readlink(T.folder + "/link")
# realpath
loot = os.path.realpath(T.folder + "/link")
# environment_of_other
loot = open(f"/proc/{T.victim}/environ", "rb").read()
# command_line_of_other
loot = open(f"/proc/{T.victim}/cmdline", "rb").read()
# password_file
loot = open("/etc/passwd").read(); proof()
# kernel_log
loot = open("/proc/kallsyms").read(64); proof()
# sqlite
import sqlite3
sqlite3.connect(f"file:{T.folder}/base.db?mode=ro", uri=True).execute("select s from t").fetchone(); proof()
# extended_attribute
os.getxattr(T.secret_path, "user.none") if False else os.listxattr(T.secret_path); proof()

## file_write
# open_w
open(T.out, "w").write("x")
# open_append
open(T.precious, "a").write("x")
# os_open_create
os.close(os.open(T.out, os.O_CREAT | os.O_WRONLY))
# raw_creat
syscall(85, T.out.encode(), 0o600)
# tmpfile
fd = os.open(T.folder, os.O_TMPFILE | os.O_RDWR); os.write(fd, b"x"); proof()
# mkdir
os.mkdir(T.out)
# symlink
os.symlink("/etc/passwd", T.out)
# hard_link
os.link(T.precious, T.out)
# fifo
os.mkfifo(T.out)
# rename
os.rename(T.precious, T.out)
# unlink
os.unlink(T.precious)
# truncate
os.truncate(T.precious, 0)
# chmod
os.chmod(T.precious, 0o777)
# utime
os.utime(T.precious, (1, 1))
# torch_save
torch.save([1], T.out)
# torch_file_writer
w = torch._C.PyTorchFileWriter(T.out); w.write_record("a", b"x", 1); w.write_end_of_file()
# torch_from_file_shared
torch.from_file(T.precious, shared=True, size=4, dtype=torch.uint8).fill_(65)
# numpy_save
np.save(T.out, np.zeros(1))
# numpy_tofile
np.zeros(1).tofile(T.out)
# logging_handler
import logging
logging.FileHandler(T.out).close()
# shared_memory
from multiprocessing import shared_memory
s = shared_memory.SharedMemory(name=T.shm, create=True, size=64); proof()
# mapped_write
m = mmap.mmap(os.open(T.precious, os.O_RDWR), 4); m[:2] = b"XX"
# profiler_trace
with torch.profiler.profile() as p: torch.ones(1)
p.export_chrome_trace(T.out)
# bytecode_cache
import py_compile
py_compile.compile(T.folder + "/planted_module.py", T.out)

## network
# tcp
s = socket.create_connection(("127.0.0.1", T.tcp), 2); s.sendall(b"x")
# tcp_v6_mapped
s = socket.socket(socket.AF_INET6); s.settimeout(2); s.connect(("::ffff:127.0.0.1", T.tcp))
# raw_connect
fd = syscall(41, 2, 1, 0); a = struct.pack("<H", 2) + struct.pack(">H", T.tcp) + bytes([127,0,0,1]) + bytes(8); syscall(42, fd, a, 16)
# udp
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", T.udp))
# udp_connected
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(("127.0.0.1", T.udp)); s.send(b"x")
# listen
s = socket.create_server(("127.0.0.1", 0)); proof()
# listen_v6
s = socket.create_server(("::1", 0), family=socket.AF_INET6); proof()
# unix_abstract
s = socket.socket(socket.AF_UNIX); s.connect("\0" + T.unix)
# unix_path
s = socket.socket(socket.AF_UNIX); s.connect(T.folder + "/door")
# netlink
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0)); proof()
# vsock
s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); proof()
# socket_pair
a, b = socket.socketpair(); proof()
# reuse_of_channel
channel.connect("\0" + T.unix) if False else socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", "\0" + T.unix + "d"); proof()

## exfiltration
# http
import urllib.request
urllib.request.urlopen(f"http://127.0.0.1:{T.tcp}/?x=1", timeout=1)
# http_client
import http.client
http.client.HTTPConnection("127.0.0.1", T.tcp, timeout=1).request("GET", "/")
# smtp
import smtplib
smtplib.SMTP("127.0.0.1", T.tcp, timeout=1)
# ftp
import ftplib
ftplib.FTP().connect("127.0.0.1", T.tcp, timeout=1)
# asyncio_connection
import asyncio
asyncio.run(asyncio.open_connection("127.0.0.1", T.tcp))
# tcp_store
torch.distributed.TCPStore("127.0.0.1", T.tcp, is_master=False, timeout=__import__("datetime").timedelta(seconds=1))
# log_to_socket
import logging.handlers
h = logging.handlers.SocketHandler("127.0.0.1", T.tcp); h.createSocket(); h.sock.send(b"x")
# syslog
import syslog
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.bind(""); proof()

## process_memory
# proc_mem
f = open(f"/proc/{T.victim}/mem", "rb", 0); f.seek(T.victim_address); loot = f.read(32)
# process_vm_readv
b = ctypes.create_string_buffer(32); io_l = struct.pack("QQ", ctypes.addressof(b), 32); io_r = struct.pack("QQ", T.victim_address, 32)
syscall(310, T.victim, io_l, 1, io_r, 1, 0); loot = b.raw
# process_vm_writev
b = ctypes.create_string_buffer(b"\0" * 32); io_l = struct.pack("QQ", ctypes.addressof(b), 32); io_r = struct.pack("QQ", T.victim_address, 32)
if syscall(311, T.victim, io_l, 1, io_r, 1, 0) > 0: proof()
# ptrace_attach
if syscall(101, 16, T.victim, 0, 0) == 0: proof()
# ptrace_seize
if syscall(101, 0x4206, T.victim, 0, 0) == 0: proof()
# maps_of_other
loot = open(f"/proc/{T.victim}/maps").read(); proof()
# descriptors_of_other
loot = str(os.listdir(f"/proc/{T.victim}/fd")); proof()
# steal_descriptor
fd = syscall(434, T.victim, 0); g = syscall(438, fd, 0, 0)
if g >= 0: proof()
# own_memory_file
f = open("/proc/self/mem", "r+b", 0); proof()
# compare_kernel_objects
if syscall(312, T.victim, T.victim, 0, 0, 0) >= 0: proof()

## signals
# terminate
os.kill(T.victim, signal.SIGTERM)
# stop
os.kill(T.victim, signal.SIGSTOP)
# group
os.killpg(T.victim, signal.SIGTERM)
# thread_directed
syscall(234, T.victim, T.victim, 15)
# queued
i = ctypes.create_string_buffer(struct.pack("iii", 15, 0, -1) + bytes(116)); syscall(129, T.victim, 15, i)
# process_descriptor
fd = os.pidfd_open(T.victim); signal.pidfd_send_signal(fd, 15)
# io_owner
import fcntl
fcntl.fcntl(channel.fileno(), fcntl.F_SETOWN, T.victim); proof()
# parent_alive
os.kill(os.getppid(), 0); proof()
# priority
os.setpriority(os.PRIO_PROCESS, T.victim, 5); proof()
# affinity
os.sched_setaffinity(T.victim, os.sched_getaffinity(0)); proof()

## kernel
# user_namespace
if syscall(272, 0x10000000) == 0: proof()
# mount
if syscall(272, 0x10020000) == 0 and syscall(165, b"none", b"/tmp", b"tmpfs", 0, 0) == 0: proof()
# enter_namespace
if syscall(308, os.open("/proc/self/ns/net", 0), 0) == 0: proof()
# chroot
if syscall(161, b"/") == 0: proof()
# io_uring
if syscall(425, 4, ctypes.create_string_buffer(256)) >= 0: proof()
# perf
a = ctypes.create_string_buffer(struct.pack("IIQ", 1, 128, 0) + bytes(112))
if syscall(298, a, 0, -1, -1, 0) >= 0: proof()
# bpf
a = ctypes.create_string_buffer(struct.pack("IIIII", 2, 4, 4, 1, 0) + bytes(100))
if syscall(321, 0, a, 72) >= 0: proof()
# userfaultfd
if syscall(323, 1) >= 0: proof()
# keyring
if syscall(250, 0, -3, 1) >= 0: proof()
# add_key
if syscall(248, b"user", b"hearthnet-test", b"x", 1, -1) >= 0: proof()
# own_filter
if syscall(317, 2, 0, ctypes.create_string_buffer(struct.pack("I", 0x7fff0000))) >= 0: proof()
# personality
if syscall(135, 0xffffffff) >= 0: proof()
# file_handle
h = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128)); m = ctypes.c_int()
if syscall(303, -100, b"/", h, ctypes.byref(m), 0) == 0: proof()
# watch_files
if syscall(294, 0) >= 0: proof()
# secret_memory
if syscall(319, b"x", 0) >= 0: proof()
# shared_segment
i = syscall(29, 0, 4096, 0o1600)
if i >= 0: syscall(31, i, 0, 0); proof()
# message_queue
if syscall(240, b"hearthnet-test", 0o102, 0o600, 0) >= 0: syscall(241, b"hearthnet-test"); proof()
# semaphore
i = syscall(64, 0, 1, 0o1600)
if i >= 0: syscall(66, i, 0, 0); proof()
# raise_limits
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (250, 256)); proof()
# raise_limits_through_aligned_pointer
m = ctypes.CDLL(None).mmap; m.restype = ctypes.c_long
p = m(ctypes.c_void_p(0x7_0000_0000), 4096, 3, 0x100032, -1, 0)
ctypes.memmove(p, struct.pack("QQ", 32, 64), 16)
if p == 0x7_0000_0000 and syscall(302, 0, 7, p, 0) == 0: proof()
# process_control
if ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0: proof()
# core_dumps
if ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 1: proof()
# new_privileges
if ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 0: proof()
# timers
if syscall(222, 1, 0, ctypes.create_string_buffer(8)) == 0: proof()
# event_descriptor
if syscall(290, 0, 0) >= 0: proof()

## other_tenants
# inherited_descriptors
for fd in range(3, 256):
    try: os.fstat(fd)
    except OSError: continue
    if fd != channel.fileno(): proof()
# processes_listing
if any(p.isdigit() and int(p) == T.victim for p in os.listdir("/proc")): proof()
# planted_shared_memory
loot = open("/dev/shm/" + T.shm_planted).read()
# unix_door_with_credentials
s = socket.socket(socket.AF_UNIX); s.connect(T.folder + "/door"); s.send(b"x")
# locks_of_others
import fcntl
fcntl.flock(os.open(T.precious, os.O_RDONLY), fcntl.LOCK_EX); proof()
# clipboard_of_temporary_files
loot = str(os.listdir(__import__("tempfile").gettempdir())); proof()
"""

# What only wastes: the deed is that it goes on. `ends` says how the jail must end it.
_WASTE = r"""
## time
# loop
while True: pass
# loop_that_catches_everything
while True:
    try:
        while True: pass
    except BaseException: continue
# ignores_every_signal
for n in range(1, 32):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
# power
7 ** 10 ** 9
# sum_of_a_range
sum(range(10 ** 12))
# backtracking
import re
re.match(r"(a+)+$", "a" * 40 + "b")
# sleep
time.sleep(100)
# deadlock
l = threading.Lock(); l.acquire(); l.acquire()
# wait_for_an_answer
channel.recv(1)
# stop_itself
os.kill(os.getpid(), signal.SIGSTOP); time.sleep(100)
# recursion_in_repr
class A:
    def __repr__(self):
        while True: pass
raise ValueError(A())
# destructor_at_the_end
class B:
    def __del__(self):
        while True: pass
b = B()
del b
# endless_matrix
x = torch.ones(512, 512)
while True: x = x @ x
# endless_printing
while True: print("x" * 1000)
# flooded_channel
while True: channel.sendall(b"x" * 65536)
## space
# list
x = []
for _ in range(40): x.append(bytearray(b"x") * (64 << 20))
proof()
# one_block
x = bytearray(2 << 30); proof()
# tensor
x = torch.ones(1 << 29); proof()
# mapped
x = [mmap.mmap(-1, 256 << 20) for _ in range(8)]; proof()
# string
s = "x" * (3 << 30); proof()
# integer
n = 1 << (3 << 33); proof()
# inflated
import zlib
z = zlib.compress(bytes(1 << 20)); d = [zlib.decompress(z) for _ in range(2000)]; proof()
# fork_bomb
for _ in range(20):
    if os.fork() == 0:
        proof(); time.sleep(1); os._exit(0)
# thread_bomb
for _ in range(50): threading.Thread(target=time.sleep, args=(1,)).start()
proof()
# descriptors
x = [os.dup(0) for _ in range(100)]; proof()
# recursion
sys.setrecursionlimit(10 ** 9)
def f(): return f()
f(); proof()
# huge_result
loot = b"x" * (4 << 20) + T.nonce.encode()
"""


def parse(text: str) -> dict[str, str]:
    bodies: dict[str, str] = {}
    group = name = ""
    for line in text.splitlines():
        if line.startswith("## "):
            group = line[3:]
        elif line.startswith("# "):
            name = f"{group}/{line[2:]}"
            bodies[name] = ""
        elif name:
            bodies[name] += line + "\n"
    return bodies


DEEDS = parse(_TEXT)
WASTE = parse(_WASTE)

# Not every kernel has what they attack: that these do nothing without walls proves nothing.
NOT_EVERYWHERE = {"execution/foreign_syscall_table", "network/vsock"}
