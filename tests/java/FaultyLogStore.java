package streammerge.tests;

import io.delta.storage.CloseableIterator;
import io.delta.storage.LocalLogStore;
import java.io.IOException;
import java.util.Iterator;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.Path;

/**
 * A log store whose next commit to one table goes wrong, or waits, in a chosen way.
 *
 * <p>Serves the scheme "faulty:" only, so no other table of the JVM notices it.
 */
public class FaultyLogStore extends LocalLogStore {
  /** What happens to the next commit. */
  private static volatile String fault = "";
  /** Part of the commit's path. */
  private static volatile String where = "";
  /** How many commits are let through before it. */
  private static volatile int skipped = 0;

  private static volatile boolean unreadable = false;
  private static volatile CountDownLatch arrived = new CountDownLatch(1);
  private static volatile CountDownLatch released = new CountDownLatch(1);

  public FaultyLogStore(Configuration conf) {
    super(conf);
  }

  public static synchronized void arm(String newFault, String newWhere, int newSkipped) {
    fault = newFault;
    where = newWhere;
    skipped = newSkipped;
    unreadable = false;
    arrived = new CountDownLatch(1);
    released = new CountDownLatch(1);
  }

  public static boolean awaitArrival(long seconds) throws InterruptedException {
    return arrived.await(seconds, TimeUnit.SECONDS);
  }

  public static void release() {
    released.countDown();
  }

  public static boolean isArmed() {
    return !fault.isEmpty();
  }

  private static synchronized String take(Path path) {
    if (fault.isEmpty() || !path.toString().contains(where) || !path.getName().endsWith(".json")) {
      return "";
    }
    if (skipped > 0) {
      skipped--;
      return "";
    }
    String taken = fault;
    fault = "";
    return taken;
  }

  @Override
  public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration conf) throws IOException {
    String taken = take(path);
    switch (taken) {
      case "wait":
        // The transaction has read its snapshot and written its files; only the commit is missing.
        arrived.countDown();
        try {
          if (!released.await(120, TimeUnit.SECONDS)) {
            throw new IOException("nobody released the commit " + path);
          }
        } catch (InterruptedException e) {
          throw new IOException(e);
        }
        break;
      case "refuse":
        throw new IOException("injected: the disk is full");
      case "lose answer":
        put(path, actions, overwrite, conf);
        throw new IOException("injected: the answer to the commit was lost");
      case "put twice":
        put(path, actions, overwrite, conf);
        throw new java.nio.file.FileAlreadyExistsException(path.toString());
      case "lose answer, then unreadable":
        put(path, actions, overwrite, conf);
        unreadable = true;
        throw new IOException("injected: the answer to the commit was lost");
      default:
        break;
    }
    put(path, actions, overwrite, conf);
  }

  /** One at a time, whichever instance: each looks whether the file is there, and then renames. */
  private void put(Path path, Iterator<String> actions, Boolean overwrite, Configuration conf) throws IOException {
    synchronized (FaultyLogStore.class) {
      super.write(path, actions, overwrite, conf);
    }
  }

  @Override
  public CloseableIterator<String> read(Path path, Configuration conf) throws IOException {
    refuseToRead(path);
    return super.read(path, conf);
  }

  @Override
  public Iterator<FileStatus> listFrom(Path path, Configuration conf) throws IOException {
    refuseToRead(path);
    return super.listFrom(path, conf);
  }

  private static void refuseToRead(Path path) throws IOException {
    if (unreadable && path.toString().contains(where)) {
      throw new IOException("injected: the storage does not answer");
    }
  }

  /** Otherwise Delta holds a lock of the table while it commits, and nobody could overtake a waiting commit. */
  @Override
  public Boolean isPartialWriteVisible(Path path, Configuration conf) {
    return false;
  }
}
