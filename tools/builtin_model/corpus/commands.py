"""The commands of hearthnet and what each is for. Pure data; a test compares it with the program.

A goal is what somebody wants, as it goes into 'How do I ...?'; `asked` are questions in their own
words; `verb` is what comes after 'hearthnet' in a question about the command itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.builtin_model.corpus.topics import Topic

_WAYS = (
    "How do I {goal}?", "How do I {goal}?", "How can I {goal}?", "I want to {goal}.",
    "Which command do I use to {goal}?", "What do I type to {goal}?", "Can I {goal}?",
    "How does one {goal}?", "I would like to {goal}.", "Show me how to {goal}.",
    "What is the command to {goal}?", "how to {goal}", "I need to {goal}.",
    "Is it possible to {goal}?", "Help me to {goal}.",
)  # fmt: skip
_ABOUT = (
    "What does `hearthnet {verb}` do?", "What does `hearthnet {verb}` do?",
    "What is `hearthnet {verb}`?", "When do I need `hearthnet {verb}`?", "hearthnet {verb}",
    "Explain `hearthnet {verb}`.", "What is hearthnet {verb} for?", "What does {verb} do?",
    "What is the {verb} command?", "Explain the {verb} command.", "What can I do with {verb}?",
    "When do I use the {verb} command?", "What is the command {verb} for?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Command:
    """One command, and the one answer to all questions about it."""

    verb: str
    goals: tuple[str, ...]
    answer: str
    asked: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    @property
    def topic(self) -> Topic:
        """All questions about this command. Half of them are those in their own words."""
        asked = [way.format(goal=goal) for goal in self.goals for way in _WAYS]
        asked += [about.format(verb=self.verb) for about in _ABOUT] * 2
        own = max(1, len(asked) // (2 * len(self.asked))) if self.asked else 0
        return Topic((*asked, *self.asked * own), (self.answer,), self.more)


COMMANDS = (
    Command(
        "up",
        ("start hearthnet", "start a node", "begin", "found a hearth", "start the daemon",
         "set up hearthnet", "turn it on", "bring this machine in"),
        "Run `hearthnet up`. It starts the node on this machine and founds a hearth. Then invite "
        "the other machines with `hearthnet invite`.",
        ("What is the first command?", "How do I start?", "How do I run hearthnet?",
         "Where do I begin?", "What do I have to do first?", "It is not running. What now?"),
        ("With `--detach` it goes on in the background, and `hearthnet down` stops it.",),
    ),
    Command(
        "down",
        ("stop hearthnet", "stop a node", "stop the daemon", "turn it off", "quit hearthnet",
         "shut the node down", "end the program"),
        "Run `hearthnet down`. Running answers move to other machines first, and then the node "
        "stops.",
        ("How do I switch it off?",),
    ),
    Command(
        "pause",
        ("pause a node", "take a break from serving", "put my laptop to sleep",
         "stop serving for a while", "keep my machine for myself for a while"),
        "Run `hearthnet pause`. Running answers move to other machines, and this one serves "
        "nobody until you run `hearthnet resume`.",
        ("My laptop goes to sleep. What should I do?", "What should I do before my laptop sleeps?"),
    ),
    Command(
        "resume",
        ("serve again", "end the pause", "go on after a pause", "wake the node up again"),
        "Run `hearthnet resume`. The node serves again, and it tries again to load what could not "
        "be loaded before.",
        ("My laptop is awake again. What now?",),
    ),
    Command(
        "status",
        ("see the state of the mesh", "see who holds which layers", "check that it works",
         "see the status", "see what is running", "see which machines are there"),
        "Run `hearthnet status`. It shows this node, the other machines, the models, the layers, "
        "and the answers that are being written.",
        ("Who holds which layers?", "Show me the status.", "Is everything all right?",
         "How do I know that it works?", "Does it work?"),
        ("With `--json` you get the same as data for a script.",),
    ),
    Command(
        "chat",
        ("chat", "talk to a model", "talk to you", "ask the model something", "start a chat",
         "have a conversation"),
        "Run `hearthnet chat` and type your question. The answer appears word by word. Type /? to "
        "see what else you can do there.",
        ("Which command starts a chat?", "How do I ask a question?"),
        ("You can also use any client that speaks the OpenAI protocol.",),
    ),
    Command(
        "run",
        ("ask a single question", "run one prompt", "get one answer", "bring up a model",
         "start a model", "use a model in a script", "run a model", "ask once"),
        "Run `hearthnet run` with the name of the model and your question. It prints one answer. A "
        "model that is not up yet is brought up over your machines first.",
        more=("Text from a pipe is added to the question.",),
    ),
    Command(
        "top",
        ("watch the mesh", "open the dashboard", "see everything live", "watch the speed",
         "see it in my terminal all the time", "find the slowest machine"),
        "Run `hearthnet top`. It shows the machines, their layers, the answers on their way and "
        "what slows them down, live in your terminal.",
        ("Is there a dashboard?", "Is there a user interface?", "Which machine is slow?"),
        ("It also has screens for chat, jobs and the log.",),
    ),
    Command(
        "peers",
        ("see the other machines", "list the peers", "list the other nodes",
         "see who is connected", "see my neighbors"),
        "Run `hearthnet peers`. It lists the other machines and the layers that each of them "
        "holds.",
        ("Which other machines are there?", "Do the machines see each other?"),
    ),
    Command(
        "models",
        ("see which models can answer", "see why a model does not answer",
         "see all models of the mesh", "find out which layers are missing",
         "see whether a model is complete"),
        "Run `hearthnet models`. It lists the models of the mesh and what keeps each of them from "
        "answering.",
        ("Which models can answer?", "Why does the model not answer?", "Which models are up?",
         "Which layers are missing?"),
    ),
    Command(
        "pull",
        ("download a model", "get a model", "fetch the weights", "fetch a model",
         "get the weights from another machine", "download weights"),
        "Run `hearthnet pull` with the name of the model. It fetches the weights, from other "
        "machines of your hearth where they have them.",
        ("Where do I get a model?",),
        ("Every piece is checked as it comes, and it goes on where it was interrupted.",),
    ),
    Command(
        "list",
        ("list the models on my disk", "see which models I have", "see what I have downloaded",
         "list the downloaded weights"),
        "Run `hearthnet list`. It lists the models whose weights are on this machine.",
        ("Which models do I have?", "What is on my disk?"),
    ),
    Command(
        "show",
        ("see the details of a model", "see how large a model is", "look at one model",
         "see which layers of a model are here"),
        "Run `hearthnet show` with the name of the model. It shows its size, its layers and what "
        "of it is on this machine.",
        ("How large is the model?", "How many layers does a model have?"),
    ),
    Command(
        "rm",
        ("delete a model", "remove the weights", "free disk space", "delete the files of a model",
         "remove a model from my disk"),
        "Run `hearthnet rm` with the name of the model. It deletes the weights from the disk, and "
        "it asks you first.",
        ("My disk is full. What can I do?", "The disk is full."),
    ),
    Command(
        "deploy",
        ("deploy a model", "load a model", "spread a model over the machines",
         "put a model on several machines", "split a model over my machines"),
        "Run `hearthnet deploy` with the name of the model. It spreads the layers over the "
        "machines that have room for them.",
        ("How do I get a model onto all machines?",),
        ("With `--estimate` it only tells you what would happen.",),
    ),
    Command(
        "scale",
        ("get more copies of a model", "change the number of replicas", "add a replica",
         "have fewer copies of a model", "set the replicas", "scale a model"),
        "Run `hearthnet scale` with the name of the model and a number. It changes how many copies "
        "of the model the mesh keeps.",
        ("Can I have a second copy of a model?", "Can I have a replica?"),
    ),
    Command(
        "evict",
        ("unload a model", "evict a model", "free memory", "take a model away", "take a model down",
         "get my memory back", "stop a model"),
        "Run `hearthnet evict` with the name of the model. It takes the model away from the "
        "machines, and the memory is free again.",
        ("My memory is full. What can I do?", "The memory is full."),
    ),
    Command(
        "harvest",
        ("collect activations", "harvest activations", "save activations for many prompts",
         "keep the activations of a dataset"),
        "Run `hearthnet harvest`. It runs many prompts and leaves the activations on the machines "
        "as safetensors files.",
        more=("If it is interrupted, the same command goes on where it was.",),
    ),
    Command(
        "queue",
        ("see the queue", "see the jobs", "list the jobs of nnsight clients", "see who is waiting",
         "see which jobs run", "read what a job printed"),
        "Run `hearthnet queue`. It shows the nnsight jobs that run, those that wait, and the last "
        "ones that ended.",
        ("Who is waiting?", "Which jobs are there?", "Where are the jobs?"),
    ),
    Command(
        "kill",
        ("end a job", "kill a job", "cancel a job", "stop a job that hangs"),
        "Run `hearthnet kill` with the id of the job, as `hearthnet queue` shows it. The client of "
        "the job is told.",
        ("A job hangs. What can I do?",),
    ),
    Command(
        "log",
        ("read the log", "see the log", "see what the nodes have signed",
         "see what was decided", "see the history of the hearth"),
        "Run `hearthnet log`. It shows what the machines of the hearth have signed: decisions "
        "about members, and facts.",
        ("Where is the log?", "What has happened in the hearth?"),
    ),
    Command(
        "invite",
        ("invite a friend", "invite a machine", "add a machine", "let another machine in",
         "add my laptop", "connect a second machine", "get a code"),
        "Run `hearthnet invite` on a machine that is already in. It prints a short code and a QR "
        "code. Then run `hearthnet join CODE` on the new machine.",
        ("How do others join?", "How do I get a second machine in?"),
        ("The code works only once, so nobody can use it again.",),
    ),
    Command(
        "join",
        ("join a hearth", "join", "use the code", "enter a code", "become a member",
         "bring this laptop into a hearth that is there"),
        "Run `hearthnet join CODE`. The code comes from `hearthnet invite` on a machine that is "
        "already in.",
        ("I have a code. What now?", "Where do I type the code?"),
    ),
    Command(
        "members",
        ("see who is a member", "list the members", "see who is in my hearth", "throw a machine "
         "out", "remove a member", "change a trust level", "promote a member"),
        "Run `hearthnet members`. It lists who is in your hearth and how far each is trusted. With "
        "promote, demote and revoke you change that.",
        ("Who is a member?", "Who is in my hearth?", "A laptop was stolen. What can I do?"),
    ),
    Command(
        "keys",
        ("make an API key", "create a key", "give a program access", "take a key back",
         "revoke a key", "see the API keys"),
        "Run `hearthnet keys`. It shows the keys for the HTTP API. With `hearthnet keys create` "
        "you make one, and with `hearthnet keys revoke` you take it back.",
        ("Do I need an API key?", "What is a key for?"),
    ),
    Command(
        "steer",
        ("steer a model", "publish a steering edit", "change how a model talks",
         "use a steering vector"),
        "Run `hearthnet steer publish` to give an edit a name. Chat requests can then ask for it. "
        "`hearthnet steer list` shows the edits.",
        ("What is steering?", "What is an edit?"),
    ),
    Command(
        "config",
        ("see my settings", "see the configuration", "find out where a setting comes from"),
        "Run `hearthnet config show`. It prints the settings that `hearthnet up` would use.",
        ("Where is the configuration?", "What are my settings?", "How do I change a setting?"),
        ("Each setting is a flag, a key in a TOML file, and an environment variable.",),
    ),
    Command(
        "doctor",
        ("find out what is wrong", "check this machine", "find a problem", "fix a problem",
         "see what is wrong with the network"),
        "Run `hearthnet doctor`. It says in plain words what is so on this machine, and what you "
        "can do about it.",
        ("I have a problem.", "It does not work. What can I do?", "Something is broken.",
         "Can you help me with a problem?", "There is an error."),
        ("`hearthnet doctor privacy` says who can see what of your prompts.",),
    ),
    Command(
        "restart",
        ("restart hearthnet", "restart the node", "start the daemon again", "use the new version",
         "have a changed setting heeded"),
        "Run `hearthnet restart`. It stops the daemon and starts it again with the flags that it "
        "had.",
        ("I have updated hearthnet. What now?", "I have changed a setting. What now?"),
    ),
    Command(
        "logs",
        ("read the logs", "see what the daemon prints", "follow the logs",
         "see the messages of the daemon", "look into the log file"),
        "Run `hearthnet logs`. It shows what the daemon printed, and with -f also what it prints "
        "from now on.",
        ("Where are the logs?", "Where is the log file?", "What has the daemon printed?"),
    ),
    Command(
        "service",
        ("have it start by itself", "run it as a service", "start it when I log in",
         "keep it running all the time", "start it with my computer"),
        "Run `hearthnet service install`. The node then starts whenever you log in, and again if "
        "it fails.",
        ("Does it start by itself?", "Does it run after a restart of the machine?"),
        ("`hearthnet service uninstall` takes that back.",),
    ),
    Command(
        "info",
        ("see the versions", "see which version I have", "see where the files are",
         "send you the details of my machine", "report a bug"),
        "Run `hearthnet info`. It shows the versions, this machine, and where the files of "
        "hearthnet lie.",
        ("Which version is this?", "Where are my files?"),
    ),
    Command(
        "bench",
        ("measure the speed", "measure a model", "run a benchmark",
         "see how many tokens a second I get", "test the speed of a model"),
        "Run `hearthnet bench` with the name of the model. It measures how fast prompts are read "
        "and how fast answers are written.",
        ("How fast is my model?", "Is there a benchmark?"),
    ),
    Command(
        "demo",
        ("try it out", "see a demo", "try it on one machine", "see how it looks",
         "play with it first"),
        "Run `hearthnet demo`. It shows three nodes on this machine finding each other and "
        "answering together.",
        ("Is there a demo?", "Can I try it on one machine?"),
    ),
)  # fmt: skip
COMMAND_TOPICS = tuple(command.topic for command in COMMANDS)
