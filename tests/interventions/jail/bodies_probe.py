import os
def echo(payload, channel):
    print("hello \x1b[31m red"); 
    channel.sendall(b"ping:" + channel.recv(100))
    return payload[::-1]
def spin(p, c):
    while True:
        try:
            while True: pass
        except BaseException: continue
def boom(p, c): return 1/0
def torchy(p, c):
    import torch
    x=torch.randn(64,64,requires_grad=True); (x@x).sum().backward(); 
    y=torch.nn.functional.gelu(x.bfloat16()@x.bfloat16())
    return str(float(x.grad.sum())).encode()
def warm(arg):
    pass
