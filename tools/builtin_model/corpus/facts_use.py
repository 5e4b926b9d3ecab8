"""How hearthnet is used: commands, trust, trouble. Pure data."""

from __future__ import annotations

from tools.builtin_model.corpus.topics import Topic

USE_TOPICS = (
    Topic(
        (
            "How do I start hearthnet?",
            "How do I start?",
            "How do I begin?",
            "What is the first command?",
            "How can I start a hearth?",
            "How do I run hearthnet?",
            "How do I set up hearthnet?",
            "What does `hearthnet up` do?",
        ),
        (
            "Run `hearthnet up` on the first machine. That starts the node and founds a hearth. "
            "Then invite the other machines with `hearthnet invite`.",
        ),
        ("After that, `hearthnet status` shows you who holds which layers.",),
    ),
    Topic(
        (
            "How do I add a machine?",
            "How do I join a hearth?",
            "How do others join?",
            "How do I add my laptop?",
            "How do I invite a friend?",
            "How can I connect a second machine?",
            "What does `hearthnet join` do?",
            "What does `hearthnet invite` do?",
        ),
        (
            "Run `hearthnet invite` on a machine that is already in. It shows a short code. Then "
            "run `hearthnet join CODE` on the new machine.",
        ),
        ("The code works only once, so nobody can use it again.",),
    ),
    Topic(
        (
            "How do I chat?",
            "How can I talk to the model?",
            "What does `hearthnet chat` do?",
            "How do I ask the model something?",
            "Which command starts a chat?",
        ),
        ("Run `hearthnet chat` and type your question. The answer appears word by word.",),
        ("You can also use any client that speaks the OpenAI protocol.",),
    ),
    Topic(
        (
            "How do I see the state of the mesh?",
            "What does `hearthnet status` do?",
            "How do I know that it works?",
            "Who holds which layers?",
            "Show me the status.",
            "How do I see which machines are there?",
        ),
        (
            "Run `hearthnet status`. It shows the machines, the layers that each of them holds, "
            "and whether anything is missing.",
        ),
        ("With `--json` you get the same as data for a script.",),
    ),
    Topic(
        (
            "How do I stop hearthnet?",
            "How do I stop a node?",
            "What does `hearthnet down` do?",
            "How do I turn it off?",
        ),
        ("Run `hearthnet down`. The node finishes its work and stops.",),
    ),
    Topic(
        ("How do I restart a node?", "What does `hearthnet restart` do?"),
        ("Run `hearthnet restart`. The node stops and starts again with the same identity.",),
    ),
    Topic(
        (
            "How do I find out what is wrong?",
            "What does `hearthnet doctor` do?",
            "I have a problem.",
            "It does not work. What can I do?",
            "Something is broken. Can you help?",
            "How do I find a problem?",
        ),
        (
            "Run `hearthnet doctor`. It checks the network, the keys and the models, and it tells "
            "you what to do about each problem.",
        ),
    ),
    Topic(
        ("How do I download a model?", "What does `hearthnet pull` do?", "How do I get a model?"),
        (
            "Run `hearthnet pull` with the name of the model. Then `hearthnet deploy` loads it on "
            "the machines.",
        ),
    ),
    Topic(
        ("How do I load a model?", "What does `hearthnet deploy` do?", "How do I deploy a model?"),
        (
            "Run `hearthnet deploy` with the name of the model. The layers are spread over the "
            "machines that have room for them.",
        ),
    ),
    Topic(
        ("How do I unload a model?", "What does `hearthnet evict` do?", "How do I free memory?"),
        ("Run `hearthnet evict` with the name of the model. Its memory becomes free again.",),
    ),
    Topic(
        ("Which models do I have?", "What does `hearthnet models` do?", "How do I list models?"),
        ("Run `hearthnet models`. It lists the models and where their layers are.",),
    ),
    Topic(
        ("Who is a member?", "What does `hearthnet members` do?", "How do I list the members?"),
        ("Run `hearthnet members`. It lists who is in your hearth and how far each is trusted.",),
    ),
    Topic(
        (
            "How do I see the other machines?",
            "What does `hearthnet peers` do?",
            "How do I list the peers?",
        ),
        ("Run `hearthnet peers`. It lists the other machines and how fast the link to them is.",),
    ),
    Topic(
        ("Is there a dashboard?", "What does `hearthnet top` do?", "Is there a user interface?"),
        (
            "Yes. Run `hearthnet top` and you see the machines, their layers and the speed in your "
            "terminal.",
        ),
    ),
    Topic(
        ("How do I measure the speed?", "What does `hearthnet bench` do?"),
        ("Run `hearthnet bench`. It measures how many tokens per second your mesh makes.",),
    ),
    Topic(
        (
            "Can I try it out?",
            "What does `hearthnet demo` do?",
            "Is there a demo?",
            "Can I try it on one machine?",
        ),
        ("Yes. Run `hearthnet demo`. It shows a small mesh on a single machine.",),
    ),
    Topic(
        ("Where are the logs?", "What does `hearthnet logs` do?", "How do I read the logs?"),
        ("Run `hearthnet logs`. It shows what the node has done.",),
    ),
    Topic(
        (
            "How do I change a setting?",
            "Where is the configuration?",
            "What does `hearthnet config` do?",
            "How do I see my settings?",
        ),
        (
            "Run `hearthnet config show` to see the settings. They live in a file named "
            "config.toml, and every setting can also be given as an environment variable.",
        ),
    ),
    Topic(
        (
            "Which commands are there?",
            "What commands does hearthnet have?",
            "List the commands.",
            "What can I type?",
            "Help!",
            "help",
        ),
        (
            "The most important commands are `hearthnet up`, `hearthnet invite`, `hearthnet join`, "
            "`hearthnet chat`, `hearthnet status` and `hearthnet down`. With --help you see them "
            "all.",
        ),
    ),
    Topic(
        (
            "Is there an API?",
            "Can I use the OpenAI client?",
            "Does Open WebUI work?",
            "How do I use it from a program?",
            "How do I use it from a script?",
        ),
        (
            "Yes. Each node has an HTTP API that any OpenAI client can use. Set the base URL to "
            "the address of your node.",
        ),
    ),
    Topic(
        ("What are the trust levels?", "Who may use my machine?", "What does trusted mean?"),
        (
            "There are three trust levels: member, trusted and anchor. To serve layers or to use "
            "them, a machine must be trusted.",
        ),
    ),
    Topic(
        ("What do hot, warm and cold mean?", "What is a warm model?", "What is a cold model?"),
        (
            "A hot model is on the device and ready. A warm model is in memory. A cold model is on "
            "the disk and takes a while to load.",
        ),
    ),
    Topic(
        (
            "What does shard_unavailable mean?",
            "Layers are missing. What can I do?",
            "What if a layer is missing?",
            "It says that layers are missing.",
        ),
        (
            "It means that no machine holds some of the layers. The message names them. Start the "
            "machine that has them, or deploy the model again.",
        ),
    ),
    Topic(
        ("What does weights_mismatch mean?", "Why do the weights not match?"),
        (
            "It means that two machines hold different checkpoints. All machines of a route must "
            "hold exactly the same weights.",
        ),
    ),
    Topic(
        (
            "Can I limit the memory?",
            "Will it use all of my memory?",
            "Can I still use my machine for other things?",
        ),
        (
            "Yes. You can cap the memory, and a node can hand its work over before the machine "
            "goes to sleep.",
        ),
    ),
    Topic(
        (
            "How do I ask a single question?",
            "What does `hearthnet run` do?",
            "How do I run one prompt?",
        ),
        ("Run `hearthnet run` with the name of the model and your prompt. It prints one answer.",),
    ),
    Topic(
        ("Who is waiting?", "What does `hearthnet queue` do?", "How do I see the queue?"),
        ("Run `hearthnet queue`. It shows the requests that are waiting and those that run.",),
    ),
    Topic(
        (
            "How do I get more copies of a model?",
            "What does `hearthnet scale` do?",
            "Can I have a replica?",
        ),
        ("Run `hearthnet scale`. It sets how many copies of a model the mesh keeps.",),
    ),
    Topic(
        (
            "How many machines do I need?",
            "Can I use it with one machine?",
            "Is one machine enough?",
        ),
        (
            "One machine is enough to start. With two or more, you can run larger models, and the "
            "answer survives when a machine is lost.",
        ),
    ),
    Topic(
        (
            "What hardware do I need?",
            "Does it need a GPU?",
            "Can I use a Raspberry Pi?",
            "Does it run on an old laptop?",
        ),
        (
            "No special hardware is needed. Hearthnet runs on CPUs and on GPUs, and each machine "
            "gets as many layers as it can carry.",
        ),
    ),
    Topic(
        (
            "Is hearthnet free?",
            "What does it cost?",
            "What is the license?",
            "Is hearthnet open source?",
        ),
        (
            "Hearthnet is free software under the Apache License 2.0. You only need your own "
            "machines.",
        ),
    ),
)
