package streammerge;

import io.delta.storage.S3SingleDriverLogStore;
import java.io.ByteArrayOutputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Iterator;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * A log store for Delta tables on S3 whose commits exclude each other by the store itself, whichever process or engine
 * makes them: a version is put on condition that there is none ({@code If-None-Match: *}), as delta-rs does, too.
 *
 * <p>Set {@code spark.delta.logStore.s3a.impl} to it. Needs Hadoop's S3A of 3.4.2 or newer (Spark 4.1).
 *
 * <p>The answer to a put can get lost, and the put be made again by Amazon's SDK: the second one then fails because of
 * the first. Each commit therefore carries an id of its own in the object's metadata, by which it is known again.
 *
 * <p>A store that does not know the condition ignores it, and two commits would both seem to be made. So the first
 * commit of a process into a bucket is preceded by a trial, and refused where it shows that.
 */
public class ConditionalPutLogStore extends S3SingleDriverLogStore {
  private static final String CONDITION = "fs.option.create.conditional.overwrite";
  private static final String ID = "stream-merge-commit";
  /** Of S3A: with this prefix an option of a new file is metadata of its object, and with that one it is read. */
  private static final String SET_METADATA = "fs.s3a.create.header.";
  private static final String GET_METADATA = "header.";
  /** Another request to the same name is under way (409); S3 asks for the put to be made again. */
  private static final int MOST_TRIES = 5;

  private static final long FIRST_PAUSE_MS = 50;
  /** Buckets that are known to respect the condition, by the URI of their file system. */
  private static final Set<String> RESPECT_CONDITION = ConcurrentHashMap.newKeySet();

  /** What became of a put. */
  private enum Outcome {
    MADE,
    EXISTS,
    TO_BE_REPEATED
  }

  public ConditionalPutLogStore(Configuration conf) {
    super(conf);
  }

  /**
   * Write a file of the log.
   *
   * @throws FileAlreadyExistsException somebody else has made the file.
   * @throws IOException otherwise: the file may be there or not, and may still appear.
   */
  @Override
  public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration conf) throws IOException {
    if (overwrite) {
      super.write(path, actions, true, conf);
      return;
    }
    // Before the stream is opened: what is in a stream is put when it is closed, also after a failure.
    ByteArrayOutputStream text = new ByteArrayOutputStream();
    while (actions.hasNext()) {
      text.write(actions.next().getBytes(StandardCharsets.UTF_8));
      text.write('\n');
    }
    FileSystem fs = path.getFileSystem(conf);
    Path file = fs.makeQualified(path);
    expectCondition(fs, file);
    if (!isPut(fs, file, text.toByteArray())) {
      throw new FileAlreadyExistsException(file.toString());
    }
  }

  /** Whether the file was made by this call; false: another one is there. */
  private static boolean isPut(FileSystem fs, Path file, byte[] text) throws IOException {
    String id = UUID.randomUUID().toString();
    for (int tries = 1; ; tries++) {
      Outcome outcome = put(fs, file, text, id, tries < MOST_TRIES);
      if (outcome != Outcome.TO_BE_REPEATED) {
        return outcome == Outcome.MADE;
      }
      try {
        Thread.sleep(FIRST_PAUSE_MS << tries);
      } catch (InterruptedException e) {
        Thread.currentThread().interrupt();
        throw new InterruptedIOException("interrupted while " + file + " was put");
      }
    }
  }

  private static Outcome put(FileSystem fs, Path file, byte[] text, String id, boolean mayRepeat) throws IOException {
    FSDataOutputStreamBuilder<?, ?> builder = fs.createFile(file).create().recursive();
    builder.overwrite(true); // the condition decides, not a look before
    builder.must(CONDITION, true);
    builder.must(SET_METADATA + ID, id);
    FSDataOutputStream stream = builder.build();
    try {
      stream.write(text);
    } catch (IOException e) {
      stream.abort(); // closing would put what is there
      throw e;
    }
    try {
      stream.close();
      return Outcome.MADE;
    } catch (IOException e) {
      return afterFailure(fs, file, id, mayRepeat, e);
    }
  }

  private static Outcome afterFailure(FileSystem fs, Path file, String id, boolean mayRepeat, IOException failure)
      throws IOException {
    String there;
    try {
      there = idOf(fs, file);
    } catch (IOException e) {
      failure.addSuppressed(e);
      throw failure;
    }
    if (id.equals(there)) {
      return Outcome.MADE;
    }
    if (there != null) {
      return Outcome.EXISTS; // ours cannot land any more
    }
    if (isRefused(failure)) {
      return Outcome.EXISTS; // and was deleted since
    }
    if (mayRepeat && isConflict(failure)) {
      return Outcome.TO_BE_REPEATED;
    }
    throw failure;
  }

  /** The id in a file's metadata, empty where it has none; null: there is no file. */
  private static String idOf(FileSystem fs, Path file) throws IOException {
    try {
      byte[] found = fs.getXAttrs(file).get(GET_METADATA + ID);
      return found == null ? "" : new String(found, StandardCharsets.UTF_8);
    } catch (FileNotFoundException e) {
      return null;
    }
  }

  /** Whether the store says that the object exists (412). S3A's class, which is not there when this is compiled. */
  private static boolean isRefused(Throwable failure) {
    return isOf(failure, "RemoteFileChangedException");
  }

  /** Whether the store says that another request to this name is under way (409). */
  private static boolean isConflict(Throwable failure) {
    return isOf(failure, "AWSBadRequestException") && String.valueOf(failure.getMessage()).contains("Status Code: 409");
  }

  private static boolean isOf(Throwable failure, String name) {
    for (Throwable one = failure; one != null; one = one.getCause()) {
      if (one.getClass().getSimpleName().equals(name)) {
        return true;
      }
    }
    return false;
  }

  /**
   * Try, once for a bucket and process, whether the store puts a file only where there is none; for those who commit to
   * tables there by the same condition, but not by this class.
   *
   * @param file of a table's log, whether it is there or not.
   * @throws IOException it does not, or the trial failed.
   */
  public static void expectCondition(Path file, Configuration conf) throws IOException {
    FileSystem fs = file.getFileSystem(conf);
    expectCondition(fs, fs.makeQualified(file));
  }

  private static void expectCondition(FileSystem fs, Path file) throws IOException {
    String bucket = fs.getUri().toString();
    if (RESPECT_CONDITION.contains(bucket)) {
      return;
    }
    if (!fs.hasPathCapability(file, CONDITION)) {
      throw new IOException(
          "the file system of "
              + bucket
              + " cannot create a file on condition that there is none, by which commits to Delta tables exclude each"
              + " other: it has to be S3A of Hadoop 3.4.2 or newer (Spark 4.1), and fs.s3a.create.conditional.enabled"
              + " must not be false");
    }
    // Before "0", where Delta's listings begin.
    Path trial = new Path(file.getParent(), "." + ID + "-trial-" + UUID.randomUUID());
    byte[] text = "Whether the store puts an object only where there is none.\n".getBytes(StandardCharsets.UTF_8);
    boolean isMade = isPut(fs, trial, text);
    boolean isMadeAgain = isPut(fs, trial, text);
    try {
      fs.delete(trial, false);
    } catch (IOException e) {
      // Who may not delete leaves a few bytes that no reader of the log looks at.
    }
    if (!isMade || isMadeAgain) {
      throw new IOException(
          "the store behind "
              + bucket
              + " ignores If-None-Match, so that commits of several writers to a Delta table would overwrite each other"
              + " unseen; upgrade it, or let one process write and leave spark.delta.logStore.s3a.impl out");
    }
    RESPECT_CONDITION.add(bucket);
  }
}
