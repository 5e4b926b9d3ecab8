"""How hearthnet is used, beyond single commands: chat, quality, trust, trouble. Pure data."""

from __future__ import annotations

from tools.builtin_model.corpus.topics import Topic

USE_TOPICS = (
    Topic(
        ("Which commands are there?", "What commands does hearthnet have?", "List the commands.",
         "What can I type?", "Help!", "help", "Which commands can I use?", "Show me all commands."),
        ("The most important commands are `hearthnet up`, `hearthnet invite`, `hearthnet join`, "
         "`hearthnet chat`, `hearthnet run`, `hearthnet status`, `hearthnet top` and "
         "`hearthnet down`. With `hearthnet --help` you see them all.",),
    ),
    Topic(
        ("How do I get help?", "Where is the help?", "Is there a manual?",
         "Where is the documentation?", "How do I learn more?"),
        ("Run `hearthnet --help` to see all commands. After a command, `--help` explains its "
         "options. `hearthnet` alone says what to do next.",),
    ),
    Topic(
        ("What should I do next?", "What now?", "I am lost.", "What do I do next?",
         "What is the next step?"),
        ("Run `hearthnet` alone. It says in three lines what is there and what to do next.",),
    ),
    Topic(
        ("What does /why do?", "Why did you say that?", "What else could you have said?",
         "How sure are you?", "Can I see the alternatives?", "How do I see the probabilities?"),
        ("Type /why in the chat. It shows how likely each word of my last answer was, and what "
         "else could have stood there.",),
    ),
    Topic(
        ("What is a lens?", "What does --lens do?", "What is the logit lens?",
         "What does each layer think?", "How do I see what each layer would say?"),
        ("Type /why --lens in the chat. It shows what each layer would have said, were it the last "
         "one.",),
    ),
    Topic(
        ("What does /route do?", "Which machines answered?", "Which way did the answer take?",
         "Through which machines did it go?"),
        ("Type /route in the chat. It shows through which machines the last answer came, and how "
         "fast each of them was.",),
    ),
    Topic(
        ("How do I save a chat?", "Can I keep this conversation?", "How do I load a chat?",
         "What does /save do?", "How do I go on with an old chat?"),
        ("Type /save and a name in the chat. With /load and the same name you go on with it "
         "later.",),
    ),
    Topic(
        ("How do I leave the chat?", "How do I stop an answer?", "What does /bye do?",
         "How do I get out of here?"),
        ("Type /bye to leave the chat. Ctrl-C stops only the answer.",),
    ),
    Topic(
        ("How do I clear the chat?", "Can you forget what I said?", "What does /clear do?",
         "Start again from the beginning.", "Forget everything."),
        ("Type /clear in the chat, and the conversation is forgotten. /undo forgets only the last "
         "question.",),
    ),
    Topic(
        ("What does --quant do?", "What is int4?", "What is int8?", "Can a model be smaller?",
         "How do I make a model smaller?", "How do I save memory?", "What is quantization?",
         "Can I use fewer bits?"),
        ("With `--quant int8` or `--quant int4` the layers take a half or a quarter of the memory, "
         "and they are faster. With `--quant auto` the node chooses for itself.",),
        ("Fewer bits cost a little quality. Int8 is very close to the original.",),
    ),
    Topic(
        ("What does --layers do?", "How do I choose the layers?",
         "Can I say which layers a machine holds?", "How do I hold only some layers?"),
        ("Run `hearthnet up --layers 0-3` and this machine holds the layers 0 to 3. Another one "
         "can then hold the others.",),
    ),
    Topic(
        ("What does --json do?", "How do I use it in a script?", "Can a script read the output?"),
        ("With `--json` a command prints data for a script instead of text for people.",),
    ),
    Topic(
        ("Is there an API?", "Can I use the OpenAI client?", "Does Open WebUI work?",
         "How do I use it from a program?", "How do I connect an OpenAI client?",
         "Which API does it have?"),
        ("Yes. Each node has an HTTP API that any OpenAI client can use. Set the base URL to the "
         "address of your node.",),
    ),
    Topic(
        ("Is there a web page?", "Can I use it in the browser?", "Can I use it on my phone?",
         "Is there a page in the browser?"),
        ("Yes. Open the address of the API in your browser: there is a page with the machines, "
         "their layers and a chat.",),
    ),
    Topic(
        ("What are the trust levels?", "Who may use my machine?", "What does trusted mean?",
         "What is an anchor?"),
        ("There are three trust levels: member, trusted and anchor. To serve layers or to use "
         "them, a machine must be trusted.",),
    ),
    Topic(
        ("What is the recovery code?", "I have lost my first machine.",
         "What is the recovery code for?", "My anchor is gone."),
        ("The recovery code is printed when a hearth is founded. If the first machine is lost, "
         "`hearthnet members recover` makes another one the anchor.",),
    ),
    Topic(
        ("What do hot, warm and cold mean?", "What is a warm model?", "What is a cold model?"),
        ("A hot model is on the device and ready. A warm model is in memory. A cold model is on "
         "the disk and takes a while to load.",),
    ),
    Topic(
        ("What does shard_unavailable mean?", "Layers are missing. What can I do?",
         "What if a layer is missing?", "It says that layers are missing."),
        ("It means that no machine holds some of the layers. The message names them. Start the "
         "machine that has them, or deploy the model again.",),
    ),
    Topic(
        ("What does weights_mismatch mean?", "Why do the weights not match?"),
        ("It means that two machines hold different checkpoints. All machines of a route must hold "
         "exactly the same weights.",),
    ),
    Topic(
        ("The machines do not see each other.", "Why is my other machine not found?",
         "My laptop is not found.", "It does not find the other machine."),
        ("Look at what `hearthnet up` says about the network. Where it does not work by itself, "
         "give it the address with `--peer HOST:PORT`.",),
    ),
    Topic(
        ("Can I limit the memory?", "Will it use all of my memory?",
         "Can I still use my machine for other things?"),
        ("Yes. A node measures what is free and leaves some room, and it hands its work over "
         "before the machine goes to sleep.",),
    ),
    Topic(
        ("How many machines do I need?", "Can I use it with one machine?",
         "Is one machine enough?"),
        ("One machine is enough to start. With two or more, you can run larger models, and the "
         "answer survives when a machine is lost.",),
    ),
    Topic(
        ("What hardware do I need?", "Does it need a GPU?", "Can I use a Raspberry Pi?",
         "Does it run on an old laptop?"),
        ("No special hardware is needed. Hearthnet runs on CPUs and on GPUs, and each machine gets "
         "as many layers as it can carry.",),
    ),
    Topic(
        ("Is hearthnet free?", "What does it cost?", "What is the license?",
         "Is hearthnet open source?"),
        ("Hearthnet is free software under the Apache License 2.0. You only need your own "
         "machines.",),
    ),
)  # fmt: skip
