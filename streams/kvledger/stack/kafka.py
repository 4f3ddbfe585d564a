"""A single-node Kafka as a local process, on data that survives ``kill`` and ``start``."""

from __future__ import annotations

import base64
import contextlib
import uuid
from pathlib import Path
from typing import Final

from kvledger.errors import Unavailable
from kvledger.stack.cache import Java
from kvledger.stack.folders import DataFolder
from kvledger.stack.ports import HOST, answers, await_free, free_ports, is_free
from kvledger.stack.process import Process, Progress, run, silent

START_SECONDS_MAX: Final = 90.0
"""4 to 6 s on an idle machine, 14 s after a kill; several times that when tests compete for two cores."""

FORMAT_SECONDS_MAX: Final = 60.0
METADATA_SECONDS_MAX: Final = 5.0
"""20 ms on an idle machine; what waits for a broker asks again."""

PORT_TRIES: Final = 3
"""A port found free may be taken before the broker binds it; three in a row are no accident."""

JAVA_FLAGS: Final = (
    "-Xms128m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-XX:+ExitOnOutOfMemoryError",
)
"""For a start in seconds and a small footprint: the first compiler only, the simplest collector."""

PROPERTIES: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller}
listeners=PLAINTEXT://{host}:{broker},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{advertised}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
num.partitions=1
# Faust and librdkafka would make topics by asking for them, with one partition and no policy.
auto.create.topics.enable=false
offsets.topic.num.partitions=4
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
# Fault tests want sessions shorter than the 6 s that brokers allow by default.
group.min.session.timeout.ms=1000
num.network.threads=2
num.io.threads=2
num.recovery.threads.per.data.dir=1
log.cleaner.dedupe.buffer.size=16777216
log.cleaner.threads=1
controlled.shutdown.enable=true
# A broker killed hard may register again only when its old session has lapsed: 2 s instead of 9.
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=2000
"""

LOGGING: Final = """\
Configuration:
  status: "ERROR"
  Appenders:
    Console:
      name: "console"
      target: "SYSTEM_OUT"
      PatternLayout:
        pattern: "%d %p %c{1}: %m%n"
  Loggers:
    Root:
      level: "WARN"
      AppenderRef:
        ref: "console"
    Logger:
      - name: "kafka.server.KafkaRaftServer"
        level: "INFO"
      - name: "org.apache.kafka.common.utils.AppInfoParser"
        level: "ERROR"
"""


class LocalKafka:
    """A broker and controller in one JVM; ``start`` after ``stop`` or ``kill`` (-9) keeps data and ports."""

    def __init__(
        self, folder: DataFolder, jars: Path, java: Java, *, name: str = "kafka", advertised: str | None = None
    ) -> None:
        """Nothing runs yet; files go to ``folder/name``, which may hold the data of an earlier life.

        ``advertised`` is the ``host:port`` that clients are told to go to, where something stands before the broker.
        """
        self._home = folder.path / name
        self._folder = folder
        self._java = java
        self._jars = jars
        self._advertised = advertised
        self._broker_port = self._controller_port = 0
        self._cluster = ""
        self._process: Process | None = None

    @property
    def bootstrap(self) -> str:
        """``host:port`` for clients."""
        if not self._broker_port:
            msg = "Kafka was not started"
            raise RuntimeError(msg)
        return f"{HOST}:{self._broker_port}"

    @property
    def process(self) -> Process:
        """The JVM, for its pid, its log and whether it runs."""
        if self._process is None:
            msg = "Kafka was not started"
            raise RuntimeError(msg)
        return self._process

    @property
    def running(self) -> bool:
        """Whether the JVM lives; it may still be starting."""
        return self._process is not None and self._process.running

    def start(self, progress: Progress = silent) -> None:
        """Format the data where it is new, start, and wait until the broker answers for its metadata.

        About 5 s, 6 to 14 s after ``kill``. Raises Unavailable with the end of the broker's log.
        """
        if self._process is not None:
            await_free(self._broker_port, self._controller_port)  # where they are not, the broker says so better
            self._launch(progress)
            return
        for attempt in range(1, PORT_TRIES + 1):
            self._prepare()
            try:
                self._launch(progress)
            except Unavailable:
                if attempt == PORT_TRIES or "Address already in use" not in self.process.tail(200):
                    raise
            else:
                return

    def stop(self) -> None:
        """SIGTERM and wait; data and ports stay for another ``start``."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """SIGKILL and wait, as a crash would end it."""
        if self._process is not None:
            self._process.kill()

    def _prepare(self) -> None:
        """Choose ports, write the configuration, format the data folder once."""
        data = self._home / "data"
        data.mkdir(parents=True, exist_ok=True)
        broker, controller = self._broker_port, self._controller_port = self._ports()
        config = self._home / "server.properties"
        advertised = self._advertised or f"{HOST}:{broker}"
        ports = {"broker": broker, "controller": controller}
        config.write_text(PROPERTIES.format(host=HOST, data=data, advertised=advertised, **ports))
        logging = self._home / "log4j2.yaml"
        logging.write_text(LOGGING)
        java = [str(self._java.binary), *JAVA_FLAGS, f"-Dlog4j2.configurationFile={logging}"]
        java += ["-cp", f"{self._jars}/*"]
        identity = data / "meta.properties"
        if not identity.exists():
            # a leading "-" would be read as a flag by the formatter
            fresh = "k" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]
            command = [*java, "kafka.tools.StorageTool", "format", "-t", fresh, "-c", str(config)]
            run("Kafka's storage format", command, log=self._home / "format.log", seconds_max=FORMAT_SECONDS_MAX)
        self._cluster = _cluster_of(identity)
        self._process = Process(
            "Kafka",
            [*java, "kafka.Kafka", str(config)],
            log=self._home / "kafka.log",
            held=(self._folder.descriptor,),
        )

    def _ports(self) -> tuple[int, int]:
        """The ports of the folder's last life if they are free, so that clients' addresses stay true; else new ones."""
        memory = self._home / "ports"
        with contextlib.suppress(OSError, ValueError):
            broker, controller = (int(word) for word in memory.read_text().split())
            if is_free(broker) and is_free(controller):
                return broker, controller
        broker, controller = free_ports(2)
        memory.write_text(f"{broker} {controller}\n")
        return broker, controller

    def _launch(self, progress: Progress) -> None:
        progress("starting Kafka…")
        self.process.start()
        try:
            self.process.wait_ready(self._is_up, START_SECONDS_MAX)
        except BaseException:
            self.process.kill()
            raise

    def _is_up(self) -> bool:
        """Whether *our* broker answers: another that took the port first would answer as well, for its own cluster."""
        return cluster_id(self.bootstrap) == self._cluster


def _cluster_of(identity: Path) -> str:
    """The cluster id that formatting wrote into ``meta.properties``."""
    for line in identity.read_text().splitlines():
        name, _, value = line.partition("=")
        if name == "cluster.id":
            return value
    msg = f"{identity} names no cluster.id; delete the data folder to start with an empty Kafka"
    raise Unavailable(msg)


def broker_answers(bootstrap: str, seconds_max: float = METADATA_SECONDS_MAX) -> bool:
    """Whether one of the brokers tells its metadata; an open port alone comes a little earlier and is not enough."""
    return cluster_id(bootstrap, seconds_max) is not None


def cluster_id(bootstrap: str, seconds_max: float = METADATA_SECONDS_MAX) -> str | None:
    """The id of the cluster that answers there with at least one broker; None where none does in time."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    host, _, port = bootstrap.rpartition(":")
    if "," not in host and port.isdigit() and not answers(host.strip("[]"), int(port)):
        return None
    # librdkafka would print each refused connection to stderr; the caller reports the one that matters.
    client = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0, "reconnect.backoff.max.ms": 200})
    try:
        metadata = client.list_topics(timeout=seconds_max)
    except KafkaException:
        return None
    return str(metadata.cluster_id) if metadata.brokers else None
